import math
from dataclasses import replace

import pytest
import torch

from gigamask.errors import GigamaskError
from gigamask.losses.focal_dice import dice_loss, focal_loss
from gigamask.losses.iou import mask_iou
from gigamask.losses.points import sample_points
from gigamask.losses.sam_loss import SamLoss
from gigamask.rng import make_rng
from gigamask.types import Prediction, PromptRound, Prompts, Targets


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


def test_sums_are_twenty_focal_one_dice_one_iou(case):
    logits, iou, truth = case
    terms = SamLoss()(played(logits, iou), truth)
    logits, iou = logits.detach(), iou.detach()
    focal_each, dice_each = (
        focal_loss(logits, truth.masks, truth.valid),
        dice_loss(logits, truth.masks, truth.valid),
    )
    actual = mask_iou(logits, truth.masks, truth.valid)
    expected = [
        float(
            20 * focal_each[m, m % 3]
            + dice_each[m, m % 3]
            + (iou[m, m % 3] - actual[m, m % 3]) ** 2
        )
        for m in range(4)
    ]
    assert terms.per_mask.tolist() == pytest.approx(expected, rel=1e-12)
    assert float(terms.loss.detach()) == pytest.approx(sum(expected), rel=1e-12)
    assert float(terms.count) == 4
    assert float(terms.parts["focal"]) == pytest.approx(
        float(sum(focal_each[m, m % 3] for m in range(4)))
    )
    assert float(terms.parts["dice"]) == pytest.approx(
        float(sum(dice_each[m, m % 3] for m in range(4)))
    )
    assert float(terms.parts["iou_head"]) == pytest.approx(
        float(sum((iou[m, m % 3] - actual[m, m % 3]) ** 2 for m in range(4)))
    )
    assert float(terms.parts["iou"]) == pytest.approx(
        float(sum(actual[m, iou[m].argmax()] for m in range(4)))
    ), "of the answer that goes on"
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


@pytest.mark.parametrize(
    ("supervise", "iou_supervise", "mask_learns", "iou_learns"),
    [
        ("best", "best", *[[[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]] * 2),
        ("best", "all", [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]], [[1, 1, 1]] * 4),
        ("all", "best", [[1, 1, 1]] * 4, [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]),
        ("all", "all", [[1, 1, 1]] * 4, [[1, 1, 1]] * 4),
        ("single", "best", [[1, 0, 0]] * 4, [[1, 0, 0]] * 4),
        ("single", "all", [[1, 0, 0]] * 4, [[1, 1, 1]] * 4),
    ],
)
def test_who_learns(case, supervise, iou_supervise, mask_learns, iou_learns):
    logits, iou, truth = case
    terms = SamLoss(mask_supervision=supervise, iou_supervision=iou_supervise)(
        played(logits, iou), truth
    )
    terms.loss.backward()
    assert (logits.grad.abs().sum((2, 3)) > 0).int().tolist() == mask_learns
    assert (iou.grad != 0).int().tolist() == iou_learns
    focal_each = focal_loss(logits.detach(), truth.masks, truth.valid)
    if supervise == "all":
        assert float(terms.parts["focal"]) == pytest.approx(float(focal_each.mean(1).sum()))
    if supervise == "single":
        assert float(terms.parts["focal"]) == pytest.approx(float(focal_each[:, 0].sum()))


def plainly(objective, logits, iou, truth):
    """Each mask's loss by loops over masks, answers and pixels; the actual IoU is float32 in the
    objective."""
    logits, iou, losses = logits.detach(), iou.detach(), []
    for m in range(len(logits)):
        answers = []
        for k in range(logits.shape[1]):
            pixels = [
                (1 / (1 + math.exp(-float(logits[m, k, y, x]))), bool(truth.masks[m, y, x]))
                for y, x in truth.valid[m].nonzero().tolist()
            ]
            focal_terms = [
                0.25 * (1 - p) ** 2 * -math.log(p) if t else 0.75 * p**2 * -math.log(1 - p)
                for p, t in pixels
            ]
            overlap, total = sum(p for p, t in pixels if t), sum(p + t for p, t in pixels)
            hits, either = (
                sum(p > 0.5 and t for p, t in pixels),
                sum(p > 0.5 or t for p, t in pixels),
            )
            off = float(iou[m, k]) - hits / either
            mask_loss = 20 * sum(focal_terms) / len(pixels) + 1 - (2 * overlap + 1) / (total + 1)
            answers.append((mask_loss, off**2 if objective.iou_loss == "mse" else abs(off)))
        best = min(range(len(answers)), key=lambda k: answers[k][0])
        picked = 0 if objective.mask_supervision == "single" else best
        mean = [sum(each) / len(answers) for each in zip(*answers, strict=True)]
        head = mean[1] if objective.iou_supervision == "all" else answers[picked][1]
        losses.append(
            (mean[0] if objective.mask_supervision == "all" else answers[picked][0]) + head
        )
    return losses


@pytest.mark.parametrize("iou_loss", ["mse", "l1"])
@pytest.mark.parametrize("iou_supervise", ["best", "all"])
@pytest.mark.parametrize("supervise", ["best", "all", "single"])
def test_every_option_is_its_plain_loop(case, supervise, iou_supervise, iou_loss):
    logits, iou, truth = case
    objective = SamLoss(
        mask_supervision=supervise, iou_supervision=iou_supervise, iou_loss=iou_loss
    )
    assert objective(played(logits, iou), truth).per_mask.tolist() == pytest.approx(
        plainly(objective, logits, iou, truth), rel=1e-7
    )
    one = played(logits[:, :1], iou[:, :1])
    assert objective(one, truth).per_mask.tolist() == pytest.approx(
        plainly(objective, logits[:, :1], iou[:, :1], truth), rel=1e-7
    )


def test_options_reach_the_formulas(case):
    logits, iou, truth = case
    objective = SamLoss(
        2.0, 3.0, 5.0, alpha=0.8, gamma=1.0, smooth=7.0, mask_supervision="single", iou_loss="l1"
    )
    focal_each = focal_loss(logits, truth.masks, truth.valid, 0.8, 1.0)[:, 0]
    dice_each = dice_loss(logits, truth.masks, truth.valid, 7.0)[:, 0]
    head = (iou - mask_iou(logits, truth.masks, truth.valid))[:, 0].abs()
    assert torch.allclose(
        objective(played(logits, iou), truth).per_mask, 2 * focal_each + 3 * dice_each + 5 * head
    )


def test_soft_targets_are_learned_soft_and_judged_hard(case):
    logits, iou, truth = case
    soft = truth.masks * 0.7 + ~truth.masks * 0.2
    terms = SamLoss()(played(logits, iou), replace(truth, masks=soft))
    hard = SamLoss()(played(logits, iou), truth)
    assert torch.equal(terms.parts["iou"], hard.parts["iou"])
    assert terms.parts["focal"] != hard.parts["focal"]


def test_no_masks_sum_to_nothing(case):
    logits, iou, truth = case
    none = Targets(
        truth.masks[:0], truth.valid[:0], truth.boxes_input[:0], truth.cell_xy, truth.scale_xy[:0]
    )
    terms = SamLoss()(played(logits[:0], iou[:0]), none)
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


@pytest.mark.parametrize(
    "objective",
    [SamLoss(), SamLoss(num_points=30), SamLoss(ohem_pixel_ratio=0.25, ohem_min_pixels=3)],
)
def test_losses_places_and_hard_pixels_of_masks_in_chunks_are_those_of_all(shifted, objective):
    logits, iou, truth = shifted
    whole = objective(played(logits, iou), truth).per_mask
    for m in range(4):
        one = slice(m, m + 1)
        alone = Targets(
            truth.masks[one],
            truth.valid[one],
            truth.boxes_input[one],
            truth.cell_xy,
            truth.scale_xy[one],
            truth.shift[one],
        )
        assert float(
            objective(played(logits[one], iou[one]), alone).loss.detach()
        ) == pytest.approx(float(whole[m].detach()), rel=1e-6)


def test_points_without_a_shift_are_refused(case):
    logits, iou, truth = case
    with pytest.raises(GigamaskError, match=r"SamLoss.num_points.*10.*Targets.shift"):
        SamLoss(num_points=10)(played(logits, iou), truth)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    "objective",
    [SamLoss(), SamLoss(num_points=30), SamLoss(ohem_pixel_ratio=0.25, ohem_min_pixels=3)],
)
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dice_weight", -1.0),
        ("gamma", -0.5),
        ("focal_weight", float("nan")),
        ("smooth", 0.0),
        ("alpha", 1.5),
        ("num_points", -1),
        ("ohem_min_pixels", -1),
        ("oversample_ratio", 0.5),
        ("importance_sample_ratio", 1.5),
        ("ohem_pixel_ratio", 0.0),
        ("mask_supervision", "worst"),
        ("iou_loss", "l2"),
    ],
)
def test_impossible_losses_are_refused(name, value):
    with pytest.raises(GigamaskError, match=rf"SamLoss\.{name}\b.*{value}"):
        SamLoss(**{name: value})
