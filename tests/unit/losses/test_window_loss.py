"""The loss in windows against sums over samples, one by one."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gigamask.losses.iou import mask_iou
from gigamask.losses.window_loss import WindowLoss, window_weights
from gigamask.types import Prediction, PromptRound, Prompts, Targets, WindowLogits
from tests.errors import error_line

INPUT, GRID, SAMPLES = 32, 16, 4
"""Sides of the input, of the targets (cells of two pixels), and of a window in samples."""


def prompts(labels: list[list[int]], **changes) -> Prompts:
    given = torch.tensor(labels)
    return Prompts(torch.zeros(*given.shape, 2), given, None, True, **changes)


@pytest.fixture
def case() -> tuple[PromptRound, Targets]:
    """Three squares; windows of 8, 16 and 32 pixels that start at the square's first pixel.

    The squares have 6, 12 and 24 pixels, so each just fits one of the windows. The columns from 28
    are padding. The first two are asked for by clicks, the third by a box.
    """
    chance = torch.Generator().manual_seed(3)
    masks = torch.zeros(3, GRID, GRID, dtype=torch.bool)
    valid = torch.ones_like(masks)
    valid[:, :, 14:] = False
    windows = torch.zeros(3, 3, 4, dtype=torch.float64)
    for m, (start, cells) in enumerate(((4, 3), (2, 6), (0, 12))):
        masks[m, start : start + cells, start : start + cells] = True
        for k, side in enumerate((8, 16, 32)):
            windows[m, k] = torch.tensor([2 * start, 2 * start, 2 * start + side, 2 * start + side])
    logits = (
        3
        * torch.randn(
            (3, 3, SAMPLES, SAMPLES), generator=chance, dtype=torch.float64
        ).requires_grad_()
    )
    iou = torch.rand((3, 3), generator=chance, dtype=torch.float64).requires_grad_()
    answer = WindowLogits(logits, windows)
    pasted = answer.paste(GRID, INPUT)
    asked = prompts([[1, -1], [1, 0], [2, 3]])
    targets = Targets(masks, valid, torch.zeros(3, 4), (2.0, 2.0), torch.ones(3, 2))
    return PromptRound(0, asked, Prediction(pasted, iou, pasted, answer)), targets


def covered_shares(mask: Tensor, window: Tensor) -> Tensor:
    """Return the mean of a mask over each sample of a window; samples of less than a cell are
    widened to one.
    """
    sides, cells = [], torch.arange(GRID)
    for low, high in (window / 2).unflatten(0, (2, 2)).T:
        size = (high - low) / SAMPLES
        centers = low + (torch.arange(SAMPLES, dtype=torch.float64)[:, None] + 0.5) * size
        half = size.clamp(min=1.0) / 2
        overlap = torch.minimum(centers + half, cells + 1) - torch.maximum(centers - half, cells)
        sides.append(overlap.clamp(min=0) / (2 * half))
    along, down = sides
    return down @ mask.double() @ along.T


def losses_by_hand(
    round: PromptRound, targets: Targets, m: int, k: int, jaccard: bool
) -> tuple[float, float]:
    """Return cross entropy and dice, or soft Jaccard, loss of one window."""
    answer, smooth = round.prediction.in_window, 1.0
    valid = covered_shares(targets.valid[m], answer.windows[m, k])
    target = covered_shares((targets.masks & targets.valid)[m], answer.windows[m, k])
    target, p = target / valid.clamp(min=1e-9), answer.logits[m, k].detach().sigmoid()
    entropy = -(valid * (target * p.log() + (1 - target) * (1 - p).log())).sum()
    overlap, total = (valid * p * target).sum(), (valid * (p + target)).sum()
    bce = entropy / valid.sum().clamp(min=1)
    if jaccard:
        return float(bce), float(1 - (overlap + smooth / 2) / (total - overlap + smooth / 2))
    return float(bce), float(1 - (2 * overlap + smooth) / (total + smooth))


SUPERVISED = [[1, 0, 0], [0, 1, 0], [1 / 3, 1 / 3, 1 / 3]]
"""Weight of each window: the smallest that holds a clicked square, and all for a box."""


@pytest.mark.slow
@pytest.mark.parametrize("jaccard", [False, True])
def test_values_are_those_of_a_sum_over_samples(case, jaccard):
    round, targets = case
    loss = WindowLoss(dice_weight=0.5, choice_weight=0.0, jaccard=jaccard)
    terms = loss(round, targets)
    predicted = round.prediction.iou_predictions.detach()
    actual = mask_iou(round.prediction.logits, targets.masks, targets.valid)
    expected, sums = [], {"bce": 0.0, "dice": 0.0, "iou_head": 0.0, "iou": 0.0}
    for m in range(3):
        bce = dice = 0.0
        for k in range(3):
            each = losses_by_hand(round, targets, m, k, jaccard and m == 2)
            bce, dice = bce + SUPERVISED[m][k] * each[0], dice + SUPERVISED[m][k] * each[1]
        head = float((predicted[m] - actual[m]).square().sum()) / 3
        expected.append(1.5 * bce + 0.5 * dice + 4 * head)
        best = float(actual[m, predicted[m].argmax()])
        for name, value in (("bce", bce), ("dice", dice), ("iou_head", head), ("iou", best)):
            sums[name] += value
    # IoU is counted in float32.
    assert terms.per_mask.tolist() == pytest.approx(expected, rel=1e-6)
    assert float(terms.loss.detach()) == pytest.approx(sum(expected), rel=1e-6)
    assert float(terms.count) == 3
    assert {name: float(part) for name, part in terms.parts.items()} == pytest.approx(sums)
    assert not any(part.requires_grad for part in (*terms.parts.values(), terms.count))
    assert terms.per_mask.requires_grad, "so that a task can weight it"


COVERED = torch.tensor([[0.94, 0.95, 1.0], [1.0, 1.0, 1.0], [0.1, 0.2, 0.3], [0.96, 0.97, 1.0]])


@pytest.mark.parametrize(
    "changes, certain",
    [
        ({}, (0, 0, 0, 1)),
        ({"masks": torch.zeros(4, 8, 8)}, (1, 1, 1, 1)),
        (
            {
                "masks": torch.zeros(4, 8, 8),
                "has_mask_prompt": torch.tensor([True, False, False, False]),
            },
            (1, 0, 0, 1),
        ),
    ],
)
def test_weights_of_windows(changes, certain):
    """The largest answers for a mask that none of the three holds."""
    asked = replace(prompts([[1, -1], [0, 1], [-1, -1], [2, 3]]), **changes)
    clicked = [[0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
    expected = [
        [1 / 3] * 3 if is_certain else row for is_certain, row in zip(certain, clicked, strict=True)
    ]
    found = window_weights(COVERED, asked)
    assert torch.allclose(found, torch.tensor(expected, dtype=found.dtype))


def test_one_window_is_trained_whatever_it_holds():
    assert window_weights(COVERED[:, :1], prompts([[1], [1], [-1], [0]])).tolist() == [[1]] * 4


def part_of(case, chosen: slice) -> tuple[PromptRound, Targets]:
    """Return some of the masks."""
    round, targets = case
    index = torch.arange(3)[chosen]
    prediction, answer = round.prediction, round.prediction.in_window
    names = ("logits", "iou_predictions", "low_res_logits")
    some = replace(
        prediction,
        in_window=WindowLogits(answer.logits[index], answer.windows[index]),
        **{name: getattr(prediction, name)[index] for name in names},
    )
    return PromptRound(0, round.prompts.select(index), some), targets.select(index)


def test_masks_in_chunks_add_up_to_all(case):
    loss = WindowLoss(choice_weight=2.0)
    whole = loss(*case)
    for cuts in ((0, 1, 3), (0, 1, 2, 3)):
        parts = [loss(*part_of(case, slice(a, b))) for a, b in itertools.pairwise(cuts)]
        assert float(sum(part.loss for part in parts).detach()) == pytest.approx(
            float(whole.loss.detach()), rel=1e-12
        )
        assert sum(float(part.count) for part in parts) == 3
        for name, value in whole.parts.items():
            assert sum(float(part.parts[name]) for part in parts) == pytest.approx(float(value))


def test_what_lies_in_the_padding_does_not_matter(case):
    round, targets = case
    masks = targets.masks.clone()
    masks[:, :, 14:] = True
    assert torch.equal(
        WindowLoss()(round, targets).per_mask,
        WindowLoss()(round, replace(targets, masks=masks)).per_mask,
    )


def test_choice_is_one_minus_the_expected_iou(case):
    round, targets = case
    actual = mask_iou(round.prediction.logits, targets.masks, targets.valid)
    plain = WindowLoss(choice_weight=0.0)
    chosen = WindowLoss(choice_weight=3.0, choice_sharpness=5.0)
    predicted = round.prediction.iou_predictions
    weights = torch.exp(5 * predicted.detach())
    expected = 1 - (weights * actual).sum(1) / weights.sum(1)
    found = chosen(round, targets)
    assert (found.per_mask - plain(round, targets).per_mask).tolist() == pytest.approx(
        (3 * expected).tolist(), rel=1e-5
    )
    assert float(found.parts["choice"]) == pytest.approx(float(expected.sum()))
    assert "choice" not in plain(round, targets).parts
    (gradient,) = torch.autograd.grad(
        (found.per_mask - plain(round, targets).per_mask).sum(), predicted
    )
    best, worst = actual.argmax(1), actual.argmin(1)
    rows = torch.arange(3)
    assert (gradient[rows, best] < 0).all(), "the best window is to be predicted higher"
    assert (gradient[rows, worst] > 0).all()


def test_soft_targets_have_the_values_of_hard_ones(case):
    """Targets may be the covered share of each cell."""
    round, targets = case
    soft = replace(targets, masks=targets.masks.double())
    assert torch.allclose(WindowLoss()(round, soft).per_mask, WindowLoss()(round, targets).per_mask)


def test_a_model_without_windows_is_refused(case):
    round, targets = case
    bare = replace(round, prediction=replace(round.prediction, in_window=None))
    with error_line(r"--loss window.*compact.*--loss sam$"):
        WindowLoss()(bare, targets)
