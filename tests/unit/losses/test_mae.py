import pytest
import torch

from gigamask.losses.mae import mae_loss, patchify
from gigamask.rng import make_rng


def test_patches_are_rows_of_pixels_with_their_colours_together():
    pixels = torch.arange(3 * 6 * 6).view(1, 3, 6, 6).float()
    patches = patchify(pixels, 2)
    assert patches.shape == (1, 9, 12)
    assert patches[0, 5].tolist() == [
        float(colour * 36 + row * 6 + column)
        for row in (2, 3)
        for column in (4, 5)
        for colour in range(3)
    ]


@pytest.mark.parametrize("normalise", [True, False])
def test_each_image_is_the_mean_over_its_scored_patches(normalise):
    rng = make_rng(0, "test reconstruction")
    guess = torch.from_numpy(rng.standard_normal((4, 6, 12))).requires_grad_()
    truth = torch.from_numpy(rng.standard_normal((4, 6, 12)) * 3 + 1)
    truth[0, 0] = 0.5  # a patch of one colour
    scored = torch.from_numpy(rng.random((4, 6)) < 0.5)
    scored[0, 0], scored[3] = True, False
    losses = mae_loss(guess, truth, scored, normalise)
    wanted = truth
    if normalise:
        wanted = (truth - truth.mean(2, True)) / (truth.var(2, keepdim=True) + 1e-6).sqrt()
    errors = (guess - wanted).square().mean(2) * scored
    torch.testing.assert_close(losses, errors.sum(1) / scored.sum(1).clamp(1), rtol=1e-12, atol=0)
    assert losses[3] == 0
    (gradient,) = torch.autograd.grad(losses.sum(), guess)
    assert torch.equal(gradient.abs().sum(2) > 0, scored)


def test_half_precision_is_widened():
    guess = torch.ones(1, 2, 12, dtype=torch.bfloat16)
    losses = mae_loss(guess, torch.zeros(1, 2, 12), torch.ones(1, 2, dtype=torch.bool))
    assert losses.dtype == torch.float32
    assert losses.tolist() == [1.0]
