"""What a benchmark refuses, and how its tables are set."""

from dataclasses import replace

import pytest

import gigamask
from gigamask.models.init import build_model
from gigamask.pixels import PixelConfig
from gigamask.plugins.benchmarks.benchmark import benchmark, format_score, own_scores
from tests.errors import error_line
from tests.little import SPEC
from tests.plugins.benchmarks.archives import write_archive


@pytest.mark.slow
def test_models_of_other_channels_are_refused(tmp_path, scenes):
    model = build_model(replace(SPEC, pixels=PixelConfig(channels=4)), 0)
    write_archive("davis", tmp_path, count=1)
    with error_line(r"davis: .* RGB, but the weights read 4 channels"):
        benchmark("davis", model, tmp_path, device="cpu")
    with error_line("the model reads 4"):
        benchmark("bsds", model, scenes, device="cpu")


def test_its_function_is_one_of_the_python_api():
    assert gigamask.benchmark is benchmark
    assert "benchmark" in dir(gigamask)


def test_scores_are_set_by_their_units():
    answer = {"NoC@90": 2.3456, "failures": {"90": 3}, "mIoU": {"1": 0.5, "4": 0.6}, "box": 0.7}
    scores = own_scores(answer)
    assert scores == {"NoC@90": 2.3456, "failures@90": 3, "1 click": 0.5, "box": 0.7}
    printed = [format_score(metric, value) for metric, value in scores.items()]
    assert sorted(printed) == ["0.500", "0.700", "2.35", "3"]
    assert format_score("box", None) == "-"
