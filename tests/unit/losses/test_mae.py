import math

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


def by_hand(guess, truth, scored, normalise):
    """Returns the losses number by number."""
    losses = []
    for image in range(len(guess)):
        errors = []
        for patch in range(guess.shape[1]):
            if scored[image, patch]:
                numbers = truth[image, patch].tolist()
                if normalise:
                    mean = sum(numbers) / len(numbers)
                    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
                    numbers = [(x - mean) / math.sqrt(variance + 1e-6) for x in numbers]
                errors.append(
                    sum(
                        (a - b) ** 2
                        for a, b in zip(guess[image, patch].tolist(), numbers, strict=True)
                    )
                    / len(numbers)
                )
        losses.append(sum(errors) / len(errors) if errors else 0.0)
    return losses


@pytest.mark.parametrize("normalise", [True, False])
def test_each_image_is_the_mean_over_its_scored_patches(normalise):
    rng = make_rng(0, "test reconstruction")
    guess = torch.from_numpy(rng.standard_normal((4, 6, 12))).requires_grad_()
    truth = torch.from_numpy(rng.standard_normal((4, 6, 12)) * 3 + 1)
    truth[0, 0] = 0.5  # a patch of one colour
    scored = torch.from_numpy(rng.random((4, 6)) < 0.5)
    scored[0, 0], scored[3] = True, False
    losses = mae_loss(guess, truth, scored, normalise)
    assert losses.tolist() == pytest.approx(
        by_hand(guess.detach(), truth, scored, normalise), rel=1e-12
    )
    assert losses[3] == 0
    (gradient,) = torch.autograd.grad(losses.sum(), guess)
    assert torch.equal(gradient.abs().sum(2) > 0, scored)


def test_half_precision_is_widened():
    guess = torch.ones(1, 2, 12, dtype=torch.bfloat16)
    losses = mae_loss(guess, torch.zeros(1, 2, 12), torch.ones(1, 2, dtype=torch.bool))
    assert losses.dtype == torch.float32
    assert losses.tolist() == [1.0]
