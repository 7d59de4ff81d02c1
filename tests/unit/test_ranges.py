"""Thresholds and fractions outside their range are refused in one line that names them."""

from dataclasses import replace

import pytest

import gigamask
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.losses.ohem import OHEM
from gigamask.losses.sam_loss import SamLoss
from gigamask.losses.window_loss import WindowLoss
from gigamask.models.init import build_model
from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import CenterClicks, InteractiveSchedule, UniformClicks
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.workflows.evaluate import EvaluateOptions
from tests.commands import refusal
from tests.errors import error_line
from tests.little import SPEC, little

NAN = float("nan")
OUTSIDE = (-0.1, 1.1, 7.0, NAN, float("inf"))
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


REFUSED = {
    SamLoss: [
        {"dice_weight": -1.0},
        {"gamma": -0.5},
        {"focal_weight": NAN},
        {"smooth": 0.0},
        {"alpha": 1.5},
        {"num_points": -1},
        {"ohem_min_pixels": -1},
        {"oversample_ratio": 0.5},
        {"importance_sample_ratio": 1.5},
        {"ohem_pixel_ratio": 0.0},
        {"mask_supervision": "worst"},
        {"iou_loss": "l2"},
    ],
    WindowLoss: [
        {"bce_weight": -1.0},
        {"dice_weight": -0.1},
        {"iou_weight": NAN},
        {"choice_weight": -2.0},
        {"choice_sharpness": 0.0},
        {"smooth": 0.0},
        {"smooth": NAN},
    ],
    OHEM: [
        {"keep_ratio": 0.0},
        {"keep_ratio": 1.5},
        {"keep_ratio": NAN},
        {"min_kept": -1},
        {"group_by": "color"},
    ],
    InteractiveSchedule: [
        {"clicks": 0},
        {"clicks": -1, "mask_only_rounds": False},
        {"box_prob": 1.5},
        {"box_noise": -0.1},
        {"box_noise_limit_px": NAN},
        {"center_click_prob": -0.5},
    ],
    TwoSidedCorrection: [{"corrections": -1}, {"box_prob": 1.5}],
    MixedPrompts: [
        {"point_prob": 1.5},
        {"box_prob": -0.5},
        {"mask_prob": NAN},
        {"positive_prob": 2.0},
        {"mask_logit": -1.0},
    ],
    CenterClicks: [{"clicks": 0}],
    UniformClicks: [{"clicks": 0}],
}
"""Impossible values of components; the first of a row is the one that is wrong."""


@pytest.mark.parametrize(
    "component, values", [(kind, values) for kind, rows in REFUSED.items() for values in rows]
)
def test_a_component_names_the_value_that_it_refuses(component, values):
    name, value = next(iter(values.items()))
    with error_line(rf"^{component.__name__}\.{name}\b.*{value}"):
        component(**values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "segment w.pth x --out {out} --pred-iou-thresh 7",
        "segment w.pth x --out {out} --stability-score-thresh 7",
        "segment w.pth x --out {out} --cache-gb -1",
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
