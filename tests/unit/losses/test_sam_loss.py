from dataclasses import replace

import pytest
import torch

from gigamask.losses.focal_dice import dice_loss, focal_loss
from gigamask.losses.iou import mask_iou
from gigamask.losses.points import sample_points
from gigamask.losses.sam_loss import SamLoss
from gigamask.rng import make_rng
from gigamask.types import Prediction, PromptRound, Prompts, Targets
from tests.errors import error_line


def played(logits, iou):
    prompts = Prompts(
        torch.zeros(len(logits), 2, 2),
        torch.zeros(len(logits), 2, dtype=torch.int64),
        None,
        logits.shape[1] > 1,
    )
    side = min(logits.shape[2:])
    return PromptRound(0, prompts, Prediction(logits, iou, logits[:, :, :side, :side]))


@pytest.fixture
def case():
    """Four masks of three answers; mask m's answer m modulo 3 is the best by far."""
    rng = make_rng(0, "test objective")
    truth = torch.tensor(rng.random((4, 6, 8)) < 0.4)
    valid = torch.ones_like(truth)
    valid[1, :, 6:] = False
    logits = torch.tensor(rng.standard_normal((4, 3, 6, 8)))
    for m in range(4):
        logits[m, m % 3] += 4 * (truth[m].double() * 2 - 1)
    iou = torch.tensor(rng.random((4, 3)))
    return (
        logits.requires_grad_(),
        iou.requires_grad_(),
        Targets(truth, valid, torch.zeros(4, 4), (4.0, 4.0), torch.ones(4, 2)),
    )


WEIGHTS = SamLoss(2.0, 3.0, 5.0, alpha=0.8, gamma=1.0, smooth=7.0)


def test_parts_are_sums_over_the_masks(case):
    logits, iou, truth = case
    terms = SamLoss()(played(logits, iou), truth)
    iou = iou.detach()
    mask, best = torch.arange(4), torch.arange(4) % 3
    actual = mask_iou(logits.detach(), truth.masks, truth.valid)
    expected = {
        "focal": focal_loss(logits.detach(), truth.masks, truth.valid)[mask, best],
        "dice": dice_loss(logits.detach(), truth.masks, truth.valid)[mask, best],
        "iou_head": (iou - actual).square()[mask, best],
        "iou": actual[mask, iou.argmax(1)],  # of the answer that goes on
    }
    for name, each in expected.items():
        assert float(terms.parts[name]) == pytest.approx(float(each.sum())), name
    assert float(terms.loss.detach()) == pytest.approx(sum(terms.per_mask.tolist()), rel=1e-12)
    assert float(terms.count) == 4
    assert not any(part.requires_grad for part in (*terms.parts.values(), terms.count))
    assert terms.per_mask.requires_grad, "so that a task can weight it"


def test_loss_weights_decide_which_prediction_is_best():
    truth = torch.zeros(1, 1, 8, dtype=torch.bool)
    truth[..., 0] = True
    few_sure, many_unsure = torch.full((1, 8), -5.0), torch.full((1, 8), -5.0)
    few_sure[0, :2] = -0.5  # overlaps little, nowhere far wrong
    many_unsure[0, :1], many_unsure[0, 1:2] = 5.0, 4.0  # overlaps well, one pixel far wrong
    logits = torch.stack([few_sure, many_unsure])[None].requires_grad_()
    case = (
        played(logits, torch.zeros(1, 2)),
        Targets(truth, truth | True, torch.zeros(1, 4), (4.0, 4.0), torch.ones(1, 2)),
    )
    for objective, answer in [
        (SamLoss(), 0),
        (SamLoss(focal_weight=0.0), 1),
        (SamLoss(dice_weight=0.0), 0),
    ]:
        (grad,) = torch.autograd.grad(objective(*case).loss, logits)
        assert grad.abs().sum((2, 3)).gt(0).tolist() == [[answer == 0, answer == 1]]


def plainly(objective, logits, iou, truth):
    """Each mask's loss, and its focal loss, from those of all its predictions."""
    focal_each = focal_loss(logits, truth.masks, truth.valid, objective.alpha, objective.gamma)
    dice_each = dice_loss(logits, truth.masks, truth.valid, objective.smooth)
    masks = objective.focal_weight * focal_each + objective.dice_weight * dice_each
    off = (iou - mask_iou(logits, truth.masks, truth.valid)).abs()
    head = objective.iou_weight * (off**2 if objective.iou_loss == "mse" else off)
    mask = torch.arange(len(masks))
    picked = 0 if objective.mask_supervision == "single" else masks.argmin(1)
    every = objective.mask_supervision == "all"
    mask_loss, focal = (
        each.mean(1) if every else each[mask, picked] for each in (masks, focal_each)
    )
    head = head.mean(1) if objective.iou_supervision == "all" else head[mask, picked]
    return mask_loss + head, focal


@pytest.mark.parametrize("weights", [SamLoss(), WEIGHTS])
@pytest.mark.parametrize("iou_loss", ["mse", "l1"])
@pytest.mark.parametrize("iou_supervise", ["best", "all"])
@pytest.mark.parametrize("supervise", ["best", "all", "single"])
def test_every_option_is_its_formula_in_value_and_gradient(
    case, supervise, iou_supervise, iou_loss, weights
):
    logits, iou, truth = case
    objective = replace(
        weights, mask_supervision=supervise, iou_supervision=iou_supervise, iou_loss=iou_loss
    )
    for given in ((logits, iou), (logits[:, :1], iou[:, :1])):
        terms, (expected, focal) = (
            objective(played(*given), truth),
            plainly(objective, *given, truth),
        )
        torch.testing.assert_close(terms.per_mask, expected, rtol=1e-7, atol=0)
        torch.testing.assert_close(terms.parts["focal"], focal.sum().detach())
        learned, plain = (
            torch.autograd.grad(each, (logits, iou)) for each in (terms.loss, expected.sum())
        )
        torch.testing.assert_close(learned, plain, rtol=1e-7, atol=1e-12)


def test_soft_targets_are_learned_soft_and_judged_hard(case):
    logits, iou, truth = case
    soft = truth.masks * 0.7 + ~truth.masks * 0.2
    terms = SamLoss()(played(logits, iou), replace(truth, masks=soft))
    hard = SamLoss()(played(logits, iou), truth)
    assert torch.equal(terms.parts["iou"], hard.parts["iou"])
    assert terms.parts["focal"] != hard.parts["focal"]


def test_no_masks_sum_to_nothing(case):
    logits, iou, truth = case
    terms = SamLoss()(played(logits[:0], iou[:0]), truth.select(torch.arange(0)))
    terms.loss.backward()
    assert (float(terms.loss.detach()), float(terms.count), terms.per_mask.shape) == (0, 0, (0,))


@pytest.fixture
def shifted(case):
    """The same masks with logits, targets and padding on a square, and a shift."""
    logits, iou, truth = case
    shift = torch.tensor(make_rng(1, "test objective").random((4, 2))).float()
    logits = logits.detach().float()[..., :6].requires_grad_()
    return (
        logits,
        iou,
        replace(truth, masks=truth.masks[..., :6], valid=truth.valid[..., :6], shift=shift),
    )


@pytest.mark.parametrize("share", [None, 0.25])
def test_points_are_the_losses_pixels(shifted, share):
    logits, iou, truth = shifted
    objective = SamLoss(
        num_points=20,
        oversample_ratio=2.0,
        importance_sample_ratio=0.5,
        ohem_pixel_ratio=share,
        ohem_min_pixels=0,
    )
    terms = objective(replace(played(logits, iou), index=3), truth)
    seen = sample_points(logits.detach(), truth, 3, 20, 2.0, 0.5)
    expected, parts = [], torch.zeros(2, dtype=torch.float64)
    for m in range(4):
        row = seen.logits[m, :, None, None], seen.targets[m, :, None], seen.valid[m, :, None]
        focal_each = focal_loss(*row, ohem_ratio=share or 1.0, ohem_min_pixels=0)[:, 0]
        dice_each = dice_loss(*row)[:, 0]
        best = int((20 * focal_each + dice_each).argmin())
        off = iou[m, best].detach() - mask_iou(logits, truth.masks, truth.valid)[m, best]
        expected.append(float((20 * focal_each + dice_each)[best] + off**2))
        parts += torch.stack([focal_each[best], dice_each[best]]).detach()
    assert terms.per_mask.tolist() == pytest.approx(expected, rel=1e-5)
    assert [float(terms.parts["focal"]), float(terms.parts["dice"])] == pytest.approx(
        parts.tolist(), rel=1e-5
    )
    terms.loss.backward()
    assert (logits.grad.abs().sum((2, 3)) > 0).sum(1).tolist() == [1, 1, 1, 1], (
        "the best answer of each mask"
    )


def test_points_are_read_from_the_low_logits_and_iou_from_the_full(shifted):
    logits, iou, truth = shifted
    low = logits.detach().clone().requires_grad_()
    one = played(logits, iou)
    terms = SamLoss(num_points=20)(
        replace(one, prediction=replace(one.prediction, low_res_logits=low)), truth
    )
    terms.loss.backward()
    assert low.grad.abs().sum() > 0
    assert logits.grad is None


def test_hard_pixels_reach_focal_but_not_dice(case):
    logits, iou, truth = case
    plain, mined = (
        SamLoss(mask_supervision="all", ohem_pixel_ratio=share, ohem_min_pixels=5)(
            played(logits, iou), truth
        )
        for share in (None, 0.25)
    )
    assert float(mined.parts["focal"]) == pytest.approx(
        float(
            focal_loss(
                logits.detach(), truth.masks, truth.valid, ohem_ratio=0.25, ohem_min_pixels=5
            )
            .mean(1)
            .sum()
        )
    )
    assert mined.parts["focal"] > 1.5 * plain.parts["focal"], "the hardest are harder than all"
    assert mined.parts["dice"] == plain.parts["dice"]
    default = SamLoss(mask_supervision="all", ohem_pixel_ratio=0.25)(played(logits, iou), truth)
    assert default.parts["focal"] == plain.parts["focal"], (
        "a small image has fewer pixels than the minimum, and keeps all"
    )


OBJECTIVES = pytest.mark.parametrize(
    "objective",
    [SamLoss(), SamLoss(num_points=30), SamLoss(ohem_pixel_ratio=0.25, ohem_min_pixels=3)],
)


@OBJECTIVES
def test_losses_places_and_hard_pixels_of_masks_in_chunks_are_those_of_all(shifted, objective):
    logits, iou, truth = shifted
    whole = objective(played(logits, iou), truth).per_mask.tolist()
    for m in range(4):
        alone = truth.select(torch.tensor([m]))
        found = objective(played(logits[m : m + 1], iou[m : m + 1]), alone)
        assert float(found.loss.detach()) == pytest.approx(whole[m], rel=1e-6)


def test_points_without_a_shift_are_refused(case):
    logits, iou, truth = case
    with error_line(r"SamLoss.num_points.*10.*Targets.shift"):
        SamLoss(num_points=10)(played(logits, iou), truth)


@pytest.mark.parametrize("soft", [False, True])
@OBJECTIVES
def test_the_objective_never_waits_for_the_device(objective, soft):
    """Tensors without data: whatever looks at a value raises."""
    on = {"device": "meta"}
    valid = torch.zeros(4, 8, 8, dtype=torch.bool, **on)
    masks = valid.float() if soft else valid
    logits = torch.zeros(4, 3, 8, 8, requires_grad=True, **on)
    truth = Targets(
        masks,
        valid,
        torch.zeros(4, 4, **on),
        (4.0, 4.0),
        torch.ones(4, 2, **on),
        torch.zeros(4, 2, **on),
    )
    terms = objective(played(logits, torch.zeros(4, 3, **on)), truth)
    terms.loss.backward()
    assert logits.grad.shape == logits.shape
