"""SAM 2 on a GPU that is not there (`tests/on_absent_gpu.py`)."""

from functools import partial

import pytest

from tests.device.test_absent_gpu import train
from tests.on_absent_gpu import Data, check_numbers, check_waits, run_cases
from tests.plugins.sam2.models import little_sam2

pytestmark = pytest.mark.long

CASES = {"sam2": partial(train, little_sam2, freeze=())}


def test_numbers_are_those_of_the_cpu_and_a_step_waits_once(scenes, tmp_path):
    data = Data(scenes, scenes)
    (tmp_path / "gpu").mkdir()
    found = run_cases(__name__, data, tmp_path / "gpu")["sam2"]
    check_numbers(found, CASES["sam2"](data, tmp_path / "cpu", "cpu"))
    check_waits(found)
