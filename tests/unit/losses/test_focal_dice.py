import math

import pytest
import torch

from gigamask.losses.focal_dice import dice_loss, focal_dice_losses, focal_loss
from gigamask.rng import make_rng
from tests.saved_tensors import saved_tensors, storage_bytes


def numbers(*shape, position=0):
    return torch.tensor(make_rng(0, "test losses", position).standard_normal(shape))


@pytest.fixture
def case():
    """Logits, soft targets and validity of 3 masks with 2 answers, in float64."""
    valid = torch.ones(3, 5, 7, dtype=torch.bool)
    valid[1, :, 4:] = False
    valid[2, 3:] = False
    return numbers(3, 2, 5, 7) * 3, numbers(3, 5, 7, position=1).sigmoid(), valid


@pytest.mark.parametrize("smooth", [1.0, 0.0, 20.0])
def test_dice_is_its_definition_over_valid_pixels(case, smooth):
    """Values and gradients."""
    logits, soft, valid = case
    logits.requires_grad_()
    for truth in (soft, soft > 0.5):
        p, t = logits.sigmoid() * valid[:, None], (truth * valid)[:, None].double()
        expected = 1 - (2 * (p * t).sum((2, 3)) + smooth) / ((p + t).sum((2, 3)) + smooth)
        found = dice_loss(logits, truth, valid, smooth)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        slopes = (torch.autograd.grad(each.sum(), logits) for each in (found, expected))
        torch.testing.assert_close(*slopes, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("filling", [0.0, 1e4, math.inf, math.nan])
def test_padding_has_no_part_in_value_or_gradient(case, filling):
    logits, soft, valid = case
    padding = ~valid[:, None].expand_as(logits)
    for loss in (focal_loss, dice_loss):
        x = logits.masked_fill(padding, filling).requires_grad_()
        value = loss(x, soft.masked_fill(~valid, 1 - min(filling, 1)), valid)
        value.sum().backward()
        assert torch.equal(value, loss(logits, soft, valid))
        assert (x.grad[padding] == 0).all()
        assert (x.grad[~padding] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_logits_stay_finite(dtype):
    x = (
        torch.tensor([-3e4, -120.0, -30.0, 0.0, 30.0, 120.0, 3e4], dtype=dtype)
        .reshape(1, 1, 1, 7)
        .requires_grad_()
    )
    valid = torch.ones(1, 1, 7, dtype=torch.bool)
    for truth in (valid, ~valid, valid.float() * 0.3):
        for value in (
            focal_loss(x, truth, valid),
            focal_loss(x, truth, valid, gamma=0.5),
            dice_loss(x, truth, valid),
        ):
            (grad,) = torch.autograd.grad(value.sum(), x)
            assert value.isfinite().all()
            assert grad.isfinite().all()


def test_losses_are_float32_under_autocast(case):
    logits, soft, valid = case
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for loss in (focal_loss, dice_loss):
            x = logits.bfloat16().requires_grad_()
            value = loss(x, soft.float(), valid)
            value.sum().backward()
            exact = logits.bfloat16().double().requires_grad_()
            reference = loss(exact, soft.float(), valid)
            reference.sum().backward()
            assert value.dtype == torch.float32
            assert x.grad.dtype == torch.bfloat16
            assert torch.allclose(value.double(), reference, rtol=1e-6)
            assert torch.allclose(x.grad.double(), exact.grad, rtol=2**-8), (
                "rounded to bfloat16 once, at the end"
            )


def test_a_mask_without_a_valid_pixel_costs_nothing_and_no_masks_give_no_losses(case):
    logits, soft, valid = case
    x = logits.clone().requires_grad_()
    value = focal_loss(x, soft, valid & False) + dice_loss(x, soft, valid & False)
    value.sum().backward()
    assert (value == 0).all()
    assert (x.grad == 0).all()
    for loss in (focal_loss, dice_loss):
        assert loss(logits[:0], soft[:0], valid[:0]).shape == (0, 2)


def test_only_logits_and_targets_are_kept_for_the_backward_pass():
    logits = numbers(4, 3, 64, 64).float().requires_grad_()
    truth = logits.detach()[:, 0] > 0
    with saved_tensors() as kept:
        focal, dice = focal_dice_losses(logits, truth, truth | True)
        (focal + dice).sum().backward()
    maps = logits.nbytes * (1 + 1 / logits.shape[1])
    assert storage_bytes(kept) < 1.01 * maps, "the logits and the targets, once"
