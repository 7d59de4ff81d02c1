"""The plugin on a GPU that is not there (`tests/on_absent_gpu.py`)."""

from pathlib import Path

import pytest

from gigamask.cli.main import main
from tests.on_absent_gpu import Data, check_numbers, check_waits, losses, run_cases
from tests.plugins.grounding import asked

pytestmark = pytest.mark.long


def ground(data: Data, folder: Path, device: str) -> list[float]:
    words = ["ground", "train", asked.RECIPE, *asked.flags(data.described, folder)]
    assert main([*words, "--steps", "1", "--precision", "fp32", "--device", device]) == 0
    return losses(folder)


CASES = {"ground": ground}


def test_numbers_are_those_of_the_cpu_and_a_step_waits_once(scenes, described, tmp_path):
    data = Data(scenes, described)
    (tmp_path / "gpu").mkdir()
    found = run_cases(__name__, data, tmp_path / "gpu")["ground"]
    check_numbers(found, ground(data, tmp_path / "cpu", "cpu"))
    check_waits(found)
