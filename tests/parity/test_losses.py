"""Losses agree, in value and gradient, with independent implementations: those MaskFormer, DETR and
Mask2Former are trained with in Hugging Face transformers, pycocotools' IoU, and PyTorch's own
errors."""

import numpy as np
import pycocotools.mask
import pytest
import torch
from torch.nn import functional as F
from transformers.loss import loss_for_object_detection as detr
from transformers.models.mask2former.modeling_mask2former import sample_point
from transformers.models.maskformer import modeling_maskformer as maskformer

from gigamask.losses.focal_dice import dice_loss, focal_loss
from gigamask.losses.iou import iou_prediction_loss, mask_iou
from gigamask.losses.points import interpolate_at
from gigamask.rng import make_rng


def flat(logits, truth, loss):
    """Returns the other implementation's loss of each mask and answer."""
    rows = [
        loss(logits[m, k].reshape(1, -1), truth[m].reshape(1, -1))
        for m in range(len(logits))
        for k in range(logits.shape[1])
    ]
    return torch.stack(rows).reshape(logits.shape[:2])


def case(dtype, soft):
    """Logits and targets, and weights that make every answer's gradient matter."""
    rng = make_rng(0, "test parity")
    logits = torch.tensor(rng.standard_normal((4, 3, 33, 47)) * 4).to(dtype).requires_grad_()
    truth = torch.tensor(rng.random((4, 33, 47))).to(dtype)
    return (
        logits,
        truth if soft else (truth > 0.7).to(dtype),
        torch.tensor(rng.random((4, 3))).to(dtype),
    )


def agree(logits, weights, ours, theirs, tolerance):
    assert torch.allclose(ours, theirs, rtol=tolerance, atol=0)
    (our_grad,), (their_grad,) = (
        torch.autograd.grad((each * weights).sum(), logits) for each in (ours, theirs)
    )
    assert (our_grad - their_grad).abs().max() < tolerance * their_grad.abs().max()


@pytest.mark.parametrize("source", [maskformer, detr])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.8, 2.0), (0.5, 1.0)])
def test_losses_and_gradients_equal_maskformers_and_detrs(
    source, soft, dtype, tolerance, alpha, gamma
):
    logits, truth, weights = case(dtype, soft)
    valid = torch.ones(truth.shape, dtype=torch.bool)
    theirs = flat(logits, truth, lambda x, t: source.sigmoid_focal_loss(x, t, 1, alpha, gamma))
    agree(logits, weights, focal_loss(logits, truth, valid, alpha, gamma), theirs, tolerance)
    agree(
        logits,
        weights,
        dice_loss(logits, truth, valid),
        flat(logits, truth, lambda x, t: source.dice_loss(x, t, 1)),
        tolerance,
    )


def test_mask_iou_equals_pycocotools_and_its_loss_pytorchs():
    logits, truth, _ = case(torch.float64, soft=False)
    actual = mask_iou(logits, truth > 0.5, torch.ones(truth.shape, dtype=torch.bool))
    for m in range(4):
        guesses, [real] = (
            [pycocotools.mask.encode(np.asfortranarray(mask.numpy(), np.uint8)) for mask in masks]
            for masks in (logits[m] > 0, truth[m : m + 1] > 0.5)
        )
        assert actual[m].tolist() == pytest.approx(
            pycocotools.mask.iou(guesses, [real], [0])[:, 0].tolist(), rel=1e-6
        )
    predicted = torch.tensor(make_rng(0, "test parity", 1).random((4, 3)))
    assert torch.equal(
        iou_prediction_loss(predicted, actual, "mse"),
        F.mse_loss(predicted, actual.double(), reduction="none"),
    )
    assert torch.equal(
        iou_prediction_loss(predicted, actual, "l1"),
        F.l1_loss(predicted, actual.double(), reduction="none"),
    )


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
