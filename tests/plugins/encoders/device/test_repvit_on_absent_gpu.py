"""RepViT on a GPU that is not there (`tests/on_absent_gpu.py`)."""

from dataclasses import replace
from functools import partial

import pytest

from gigamask.plugins.encoders.configs import RepViT
from tests.device.test_absent_gpu import train
from tests.little import SPEC, little
from tests.on_absent_gpu import Data, check_numbers, check_waits, run_cases

pytestmark = pytest.mark.long

REPVIT = RepViT((8, 8, 16, 16), (1, 1, 1, 1))
CASES = {"repvit": partial(train, little, model=replace(SPEC, encoder=REPVIT))}


def test_numbers_are_those_of_the_cpu_and_a_step_waits_once(scenes, tmp_path):
    data = Data(scenes, scenes)
    found = run_cases(__name__, data, tmp_path)["repvit"]
    check_numbers(found, CASES["repvit"](data, tmp_path / "cpu", "cpu"))
    check_waits(found)
