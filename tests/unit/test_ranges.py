"""Thresholds and fractions outside their range are refused in one line that names them."""

from dataclasses import replace

import pytest

import gigamask
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.models.init import build_model
from gigamask.workflows.evaluate import EvaluateOptions
from tests.commands import refusal
from tests.errors import error_line
from tests.little import SPEC, little

OUTSIDE = (-0.1, 1.1, 7.0, float("nan"), float("inf"))
CHECKS = {
    "pred_iou_thresh": lambda value: AutomaticMaskConfig(pred_iou_thresh=value),
    "stability_score_thresh": lambda value: AutomaticMaskConfig(stability_score_thresh=value),
    "min_predicted_iou": lambda value: MaskFilters(min_predicted_iou=value),
    "min_stability": lambda value: MaskFilters(min_stability=value),
    "--min-predicted-iou": lambda value: EvaluateOptions(min_predicted_iou=value).check(),
    "--evaluation.min-predicted-iou": lambda value: ClickEvaluation(
        interval=1, min_predicted_iou=value
    ).check(),
    "--max-bad-fraction": lambda value: replace(
        little(), data=("x",), max_bad_fraction=value
    ).check(),
}


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("name", CHECKS)
def test_a_fraction_is_between_0_and_1(name, value):
    with error_line(name) as fault:
        CHECKS[name](value)
    assert f"{value}" in str(fault.value)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_its_limits_are_allowed(name, value):
    CHECKS[name](value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "segment w.pth x --out {out} --pred-iou-thresh 7",
        "segment w.pth x --out {out} --stability-score-thresh 7",
        "segment w.pth x --out {out} --cache-gb -1",
        "ask run x.jpg red --pred-iou-thresh 7",
        "evaluate w.pth --data x --device cpu --min-predicted-iou 5",
        "train tiny --data x --out {out} --evaluation.min-predicted-iou 5",
        "train tiny --data x --out {out} --loader.filters.min-predicted-iou 5",
        "train tiny --data x --out {out} --loader.filters.min-stability 5",
        "train tiny --data x --out {out} --max-bad-fraction 5",
    ],
)
def test_every_command_refuses_it_in_one_line(words, tmp_path, capsys):
    said = refusal(capsys, words.format(out=tmp_path / "out"))
    flag = words.split()[-2].removeprefix("--")
    assert flag.rpartition(".")[2].replace("-", "_") in said.replace("-", "_")
    assert not (tmp_path / "out").exists()


def test_the_generator_warns_of_the_same_limits():
    with pytest.warns(UserWarning, match="pred_iou_thresh"):
        gigamask.SamAutomaticMaskGenerator(build_model(SPEC, 0), pred_iou_thresh=7.0)
