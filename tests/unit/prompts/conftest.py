"""Fixtures for prompts: targets of given masks, random inputs, a model with given predictions."""

import numpy as np
import pytest
import torch

from gigamask.prompts.rounds import run_rounds
from gigamask.rng import make_rng
from gigamask.types import Prediction, RandomInputs, Targets


@pytest.fixture
def make_truth():
    """Builds targets from masks, everything valid by default, cells of 4 x 4 input pixels, and the
    masks' own boxes."""

    def build(masks, valid=None, cell_xy=(4.0, 4.0), mask_prompt_size=None):
        masks = torch.as_tensor(np.asarray(masks))
        foreground = masks if masks.dtype == torch.bool else masks > 0.5
        boxes = torch.zeros(len(masks), 4)
        for i, mask in enumerate(foreground):
            y, x = torch.nonzero(mask, as_tuple=True)
            if len(x):
                low = [int(x.min()) * cell_xy[0], int(y.min()) * cell_xy[1]]
                boxes[i] = torch.tensor(
                    [*low, (int(x.max()) + 1) * cell_xy[0] - 1, (int(y.max()) + 1) * cell_xy[1] - 1]
                )
        return Targets(
            masks,
            torch.ones_like(foreground) if valid is None else torch.as_tensor(valid),
            boxes,
            cell_xy,
            torch.ones(len(masks), 2),
            mask_prompt_size=mask_prompt_size,
        )

    return build


@pytest.fixture
def repeat():
    """Repeats targets of one mask."""
    return lambda truth, number: truth.select(torch.zeros(number, dtype=torch.int64))


@pytest.fixture
def make_draws():
    """Draws for `count` masks and `clicks` clicks, named by `position`."""

    def build(count, clicks=9, position=0):
        rng = make_rng(0, "test", position)
        return RandomInputs(
            first_prompt=torch.tensor(rng.random(count), dtype=torch.float32),
            clicks=torch.tensor(rng.random((count, clicks, 2)), dtype=torch.float32),
            box_noise=torch.tensor(rng.standard_normal((count, 4)), dtype=torch.float32),
            drop_path=torch.zeros(0, 1, 2),
        )

    return build


@pytest.fixture
def answer():
    """Builds a decode function that returns one prediction per mask in every round, with predicted
    IoU 0.5; it keeps its prompts in `.asked`."""

    def build(guess):
        logits = torch.as_tensor(np.asarray(guess)).float()[:, None] * 2 - 1

        def decode(prompts):
            decode.asked.append(prompts)
            several = logits.repeat(1, 3 if prompts.multimask_output else 1, 1, 1)
            side = min(several.shape[2:])
            return Prediction(
                several, torch.full(several.shape[:2], 0.5), several[:, :, :side, :side]
            )

        decode.asked = []
        return decode

    return build


@pytest.fixture
def play(make_truth, make_draws, answer):
    """Plays all rounds of a policy against a model that always predicts `guess`."""

    def build(guess, truth, policy, draws=None, pause=0.0):
        truth = truth if isinstance(truth, Targets) else make_truth(truth)
        draws = draws or make_draws(len(truth.masks), policy.num_uniforms)
        return list(run_rounds(answer(guess), truth, policy, draws, pause))

    return build
