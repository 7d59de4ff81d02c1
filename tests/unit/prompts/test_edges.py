"""Masks of one pixel, of every pixel and of none, no masks, and padding, under every policy."""

import itertools

import numpy as np
import pytest
import torch

from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import CenterClicks, InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.types import Prediction, RandomInputs, Targets

SIDE = 12
POLICIES = [
    InteractiveSchedule(),
    InteractiveSchedule(box_prob=0.0),
    TwoSidedCorrection(),
    TwoSidedCorrection(box_prob=0.0),
    MixedPrompts(),
    MixedPrompts(
        point_prob=1.0, box_prob=0.0, mask_prob=0.0, point_count_probs=(0.0, 0.0, 0.0, 0.0, 1.0)
    ),
    MixedPrompts(point_prob=1.0, box_prob=0.0, mask_prob=0.0, positive_prob=0.0),
    MixedPrompts(point_prob=0.0, box_prob=0.0, mask_prob=1.0),
]
DOT, FULL, EMPTY, FRAME = (
    np.zeros((SIDE, SIDE), bool),
    np.ones((SIDE, SIDE), bool),
    np.zeros((SIDE, SIDE), bool),
    np.ones((SIDE, SIDE), bool),
)
DOT[4, 7] = True
FRAME[1:-1, 1:-1] = False
TRUTHS = (DOT, FULL, EMPTY, FRAME)
VALID = FULL.copy()
VALID[:, 9:] = VALID[10:] = False


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_click_is_valid_with_the_targets_label(policy, make_truth, play):
    """Every target with every prediction, in an image with padding, thirty times each."""
    pairs = list(itertools.product(TRUTHS, TRUTHS)) * 30
    truths, guesses = (np.stack(each) for each in zip(*pairs, strict=True))
    truth = make_truth(truths, np.stack([VALID] * len(pairs)))
    rounds = play(guesses, truth, policy, pause=0.4)
    assert len(rounds) == policy.rounds
    for played in rounds:
        asked = played.prompts
        assert asked.points_xy_input.isfinite().all()
        assert asked.masks is None or asked.masks.isfinite().all()
        clicked = (asked.labels == 0) | (asked.labels == 1)
        at = ((asked.points_xy_input + 0.5) / 4 - 0.5).round().long().clamp(0, SIDE - 1)
        mask = torch.arange(len(truths))[:, None]
        assert truth.valid[mask, at[..., 1], at[..., 0]][clicked].all(), "padding is clicked"
        assert torch.equal(
            truth.masks[mask, at[..., 1], at[..., 0]][clicked].long(), asked.labels[clicked]
        )


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_where_nothing_is_valid_there_is_no_point(policy, make_truth, play):
    masks = np.stack([DOT, FULL, EMPTY])
    for played in play(masks, make_truth(masks, np.zeros_like(masks)), policy, pause=0.4):
        assert not ((played.prompts.labels == 0) | (played.prompts.labels == 1)).any()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_soft_targets_are_prompted_where_more_than_half_is_covered(policy, play):
    soft = np.full((20, SIDE, SIDE), 0.5, np.float32)
    soft[:, 4, 7] = 0.6
    for played in play(soft > 0.55, soft, policy, pause=0.4):
        positive = played.prompts.points_xy_input[played.prompts.labels == 1]
        assert (positive == torch.tensor([29.5, 17.5])).all()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_no_prompt_waits_for_the_device(policy):
    """Tensors without data: whatever looks at a value raises."""

    def zeros(*shape, dtype=torch.float32):
        return torch.zeros(*shape, dtype=dtype, device="meta")

    masks = zeros(4, 8, 8, dtype=torch.bool)
    truth = Targets(masks, masks, zeros(4, 4), (4.0, 4.0), torch.ones_like(zeros(4, 2)))
    draws = RandomInputs(zeros(4), zeros(4, policy.num_uniforms, 2), zeros(4, 4), zeros(1, 1, 2))

    def decode(prompts):
        logits = zeros(4, 3 if prompts.multimask_output else 1, 8, 8)
        return Prediction(logits, logits[..., 0, 0], logits)

    assert len(list(run_rounds(decode, truth, policy, draws, 0.3))) == policy.rounds


@pytest.mark.parametrize("policy", [*POLICIES, CenterClicks(3)], ids=repr)
def test_no_masks_play_every_round(policy, play):
    none = np.zeros((0, SIDE, SIDE), bool)
    assert len(play(none, none, policy, pause=0.4)) == policy.rounds


def mixed_points(truth, make_truth, make_draws, share):
    policy = MixedPrompts(
        point_prob=1.0,
        box_prob=0.0,
        mask_prob=0.0,
        positive_prob=share,
        point_count_probs=(0.0, 0.0, 1.0),
    )
    asked = policy.next(
        None, make_truth(np.stack([truth] * 200)), make_draws(200, clicks=policy.num_uniforms), 0.0
    )
    return {tuple(row) for row in asked.labels.tolist()}


def test_a_mask_without_background_has_positive_points_and_one_without_a_pixel_negative_ones(
    make_truth, make_draws
):
    assert mixed_points(FULL, make_truth, make_draws, 0.0) == {(1, 1, 1, -1)}
    assert mixed_points(EMPTY, make_truth, make_draws, 1.0) == {(0, 0, 0, -1)}
    assert mixed_points(DOT, make_truth, make_draws, 0.0) == {(1, 0, 0, -1)}
    assert mixed_points(DOT, make_truth, make_draws, None) == {
        (1, 0, 0, -1),
        (1, 1, 0, -1),
        (1, 1, 1, -1),
    }
