"""The plugin on a GPU that is not there (`tests/on_absent_gpu.py`)."""

from dataclasses import replace
from pathlib import Path

import pytest

import gigamask
from gigamask.models.init import build_model
from tests.little import little_compact
from tests.on_absent_gpu import Data, check_numbers, check_waits, losses, run_cases
from tests.plugins.distill.students import little_compact_student

pytestmark = pytest.mark.long


def distill(data: Data, folder: Path, device: str) -> list[float]:
    teacher = folder.with_name(f"{folder.name}.safetensors")
    gigamask.save_model(build_model(little_compact().model, 1), teacher)
    config = replace(little_compact_student(), data=(str(data.scenes),), device=device)
    gigamask.distill(
        config.with_(
            out=str(folder), teacher=str(teacher), features__steps=1, steps=1, precision="fp32"
        )
    )
    return losses(folder)


CASES = {"distill": distill}


def test_numbers_are_those_of_the_cpu_and_a_step_waits_once(scenes, tmp_path):
    data = Data(scenes, scenes)
    (tmp_path / "gpu").mkdir()
    found = run_cases(__name__, data, tmp_path / "gpu")["distill"]
    check_numbers(found, distill(data, tmp_path / "cpu", "cpu"))
    check_waits(found)
