"""Focal and dice agree, in value and gradient, with the losses MaskFormer is trained with in Hugging Face transformers."""

import pytest
import torch
from transformers.models.maskformer.modeling_maskformer import dice_loss, sigmoid_focal_loss

from gigamask.draws import draw
from gigamask.losses.mask import dice, focal


def flat(logits, truth, loss):
    """Returns the other implementation's loss of each mask and answer."""
    rows = [loss(logits[m, k].reshape(1, -1), truth[m].reshape(1, -1)) for m in range(len(logits)) for k in range(logits.shape[1])]
    return torch.stack(rows).reshape(logits.shape[:2])


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.8, 2.0), (0.5, 1.0)])
def test_losses_and_gradients_equal_maskformers(soft, dtype, tolerance, alpha, gamma):
    rng = draw(0, "test parity")
    logits = torch.tensor(rng.standard_normal((4, 3, 33, 47)) * 4).to(dtype).requires_grad_()
    truth = torch.tensor(rng.random((4, 33, 47))).to(dtype)
    truth = truth if soft else (truth > 0.7).to(dtype)
    valid = torch.ones(4, 33, 47, dtype=torch.bool)
    weights = torch.tensor(rng.random((4, 3))).to(dtype)
    pairs = [
        (focal(logits, truth, valid, alpha, gamma), flat(logits, truth, lambda x, t: sigmoid_focal_loss(x, t, 1, alpha, gamma))),
        (dice(logits, truth, valid), flat(logits, truth, lambda x, t: dice_loss(x, t, 1))),
    ]
    for ours, theirs in pairs:
        assert torch.allclose(ours, theirs, rtol=tolerance, atol=0)
        (our_grad,), (their_grad,) = (torch.autograd.grad((each * weights).sum(), logits) for each in (ours, theirs))
        assert (our_grad - their_grad).abs().max() < tolerance * their_grad.abs().max()
