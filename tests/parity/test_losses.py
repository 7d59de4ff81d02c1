"""Losses agree, in value and gradient, with independent implementations: those MaskFormer, DETR and
Mask2Former are trained with in Hugging Face transformers."""

import pytest
import torch
from transformers.loss import loss_for_object_detection as detr
from transformers.models.mask2former.modeling_mask2former import sample_point
from transformers.models.maskformer import modeling_maskformer as maskformer

from gigamask.losses.focal_dice import focal_dice_losses
from gigamask.losses.points import interpolate_at
from gigamask.rng import make_rng


def flat(logits, truth, valid, loss):
    """Returns the other implementation's loss of each mask and answer."""
    rows = [
        loss(logits[m, k, valid[m]][None], truth[m, valid[m]][None])
        for m in range(len(logits))
        for k in range(logits.shape[1])
    ]
    return torch.stack(rows).reshape(logits.shape[:2])


def case(dtype, soft):
    """Logits, targets and where they count, and weights that make each answer's gradient matter."""
    rng = make_rng(0, "test parity")
    logits = torch.tensor(rng.standard_normal((4, 3, 33, 47)) * 4).to(dtype).requires_grad_()
    truth, valid = torch.tensor(rng.random((4, 33, 47))), torch.ones(4, 33, 47, dtype=torch.bool)
    valid[1, :, 30:], valid[2, 20:] = False, False
    truth = (truth if soft else truth > 0.7) * valid
    return logits, truth.to(dtype), valid, torch.tensor(rng.random((2, 4, 3))).to(dtype)


def agree(logits, weights, ours, theirs, tolerance):
    assert torch.allclose(ours, theirs, rtol=tolerance, atol=0)
    (our_grad,), (their_grad,) = (
        torch.autograd.grad((each * weights).sum(), logits) for each in (ours, theirs)
    )
    assert (our_grad - their_grad).abs().max() < tolerance * their_grad.abs().max()


@pytest.mark.parametrize("source", [maskformer, detr])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    "alpha, gamma", [(0.8, 2.0), (0.5, 1.0), (0.5, 0.0), (0.3, 1.5), (0.6, 0.5)]
)
def test_losses_and_gradients_equal_maskformers_and_detrs(
    source, soft, dtype, tolerance, alpha, gamma
):
    logits, truth, valid, weights = case(dtype, soft)
    ours = focal_dice_losses(logits, truth if soft else truth > 0, valid, alpha, gamma)
    theirs = (
        flat(logits, truth, valid, lambda x, t: source.sigmoid_focal_loss(x, t, 1, alpha, gamma)),
        flat(logits, truth, valid, lambda x, t: source.dice_loss(x, t, 1)),
    )
    agree(logits, weights, torch.stack(ours), torch.stack(theirs), tolerance)


def test_reading_at_places_equals_mask2formers_in_value_and_gradient():
    rng = make_rng(0, "test parity", 2)
    logits = torch.tensor(rng.standard_normal((4, 3, 32, 32))).requires_grad_()
    places = torch.tensor(rng.random((4, 3, 300, 2)))
    weights = torch.tensor(rng.standard_normal((4, 3, 300)))
    theirs = sample_point(
        logits.flatten(0, 1)[:, None],
        places.flatten(0, 1),
        align_corners=False,
        padding_mode="border",
    ).view(4, 3, 300)
    agree(logits, weights, interpolate_at(logits, places), theirs, 1e-9)
