"""SAM's loss: sums, parts and gradients equal those of `SamLoss`."""

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.losses.class_loss import ClassLoss
from gigamask.losses.sam_loss import IouLoss, IouSupervision, MaskSupervision, SamLoss
from gigamask.plugins.kernels.mask_loss import FORWARD, FusedSamLoss, fused_loss
from tests.plugins.kernels.interpreted.eager import BF16, assert_close
from tests.plugins.kernels.interpreted.rounds import make_round
from tests.plugins.kernels.interpreter import patch_once

patch_once()
CHOICES = list(product(*map(get_args, (MaskSupervision, IouSupervision, IouLoss))))


def losses_and_gradients(loss, masks, count, size, dtype, soft):
    sam_round, targets = make_round(masks, count, size, dtype, soft)
    sums = loss(sam_round, targets)
    prediction = sam_round.prediction
    inputs = [prediction.logits, prediction.iou_predictions]
    total = (sums.per_mask * torch.arange(1, masks + 1)).sum()
    names = sorted(sums.parts)
    found = [sums.per_mask, sums.loss, *(sums.parts[name] for name in names)]
    return [each.detach() for each in found] + list(torch.autograd.grad(total, inputs))


def check(loss, masks, count, size, dtype=torch.float32, soft=False):
    """Compare in a dtype; the eager results are in float64."""
    limit = BF16 if dtype == torch.bfloat16 else 1e-5
    found = losses_and_gradients(fused_loss(loss), masks, count, size, dtype, soft)
    wanted = losses_and_gradients(loss, masks, count, size, torch.float64, soft)
    assert_close(found, wanted, limit)


@pytest.mark.parametrize("choices", CHOICES, ids="-".join)
def test_equals_the_eager(choices):
    of_mask, of_iou, kind = choices
    loss = SamLoss(mask_supervision=of_mask, iou_supervision=of_iou, iou_loss=kind, smooth=0.5)
    check(loss, 2, 3, (9, 7))


@pytest.mark.parametrize("count", [1, 4])
def test_equals_the_eager_for_shares_of_cells(count):
    check(SamLoss(alpha=0.6, iou_weight=2.0), 3, count, (8, 5), soft=True)


def test_rounds_as_bf16():
    check(SamLoss(), 3, 3, (16, 12), torch.bfloat16)


@pytest.mark.long
def test_64_masks_round_as_bf16():
    check(SamLoss(), 64, 3, (64, 64), torch.bfloat16)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    masks=st.integers(1, 4),
    count=st.integers(1, 4),
    size=st.tuples(st.integers(4, 64), st.integers(4, 64)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    soft=st.booleans(),
)
def test_equals_the_eager_at_any_shape(masks, count, size, dtype, soft):
    check(SamLoss(), masks, count, size, dtype, soft)


def test_a_small_loss_keeps_its_digits():
    sam_round, targets = make_round(1, 1, (64, 64))
    logits = torch.where(targets.masks, 8.0, -8.0)[:, None]
    found = []
    for loss, kind in ((FusedSamLoss(), torch.float32), (SamLoss(), torch.float64)):
        given = replace(sam_round.prediction, logits=logits.to(kind))
        sums = loss(replace(sam_round, prediction=given), targets)
        found.append(torch.stack([sums.parts["focal"], sums.parts["dice"]]).double())
    assert torch.allclose(*found, rtol=1e-5, atol=1e-7)
    assert float(found[1][0]) < 1e-9
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5, atol=0)


def test_masks_without_pixels_and_without_a_prediction():
    sam_round, targets = make_round(2, 1, (6, 5))
    nothing = torch.zeros_like(targets.valid)
    targets = replace(targets, masks=nothing, valid=nothing)
    found, wanted = (kind()(sam_round, targets) for kind in (FusedSamLoss, SamLoss))
    assert torch.equal(found.per_mask, wanted.per_mask)
    assert float(found.parts["iou"]) == len(nothing)


def test_a_prediction_that_is_not_finite_makes_the_loss_so():
    sam_round, targets = make_round(1, 3, (6, 5))
    logits = sam_round.prediction.logits.detach().index_fill(1, torch.tensor([1]), torch.nan)
    broken = replace(sam_round, prediction=replace(sam_round.prediction, logits=logits))
    assert not FusedSamLoss()(broken, targets).per_mask.isfinite().any()


def test_masks_that_do_not_count_are_left_out():
    sam_round, targets = make_round(3, 1, (6, 5))
    targets = replace(targets, counted=torch.tensor([True, True, False]))
    found, wanted = (kind()(sam_round, targets) for kind in (FusedSamLoss, SamLoss))
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-5)
    assert torch.allclose(found.parts["iou"], wanted.parts["iou"])


@pytest.mark.parametrize(
    "loss", [SamLoss(gamma=1.5), SamLoss(ohem_pixel_ratio=0.5, ohem_min_pixels=2)]
)
def test_other_forms_are_computed_without_kernels(loss):
    sam_round, targets = make_round(2, 1, (6, 5))
    assert torch.equal(
        fused_loss(loss)(sam_round, targets).per_mask, loss(sam_round, targets).per_mask
    )


def test_the_loss_within_that_of_classes_is_replaced():
    fused = fused_loss(ClassLoss(SamLoss(alpha=0.5)))
    assert fused == ClassLoss(FusedSamLoss(alpha=0.5))
    assert fused_loss(fused) == fused


def test_sums_are_the_same_at_every_call():
    sam_round, targets = make_round(2, 3, (33, 20))
    prediction = sam_round.prediction
    given = [prediction.logits, targets.masks, None, targets.valid, prediction.iou_predictions]
    one, other = (FORWARD(given, [0.25, 1.0, 20.0, 1.0, 1.0], [0, 0, 0]) for _ in range(2))
    assert all(map(torch.equal, one, other))
