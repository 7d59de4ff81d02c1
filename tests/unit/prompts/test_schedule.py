import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.prompts.mixed import MixedPrompts
from gigamask.prompts.schedule import InteractiveSchedule, UniformClicks
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.types import Prediction, PromptRound, RandomInputs
from tests.errors import error_line


def disc(x, y, radius, side=32):
    rows, columns = np.mgrid[:side, :side]
    return (columns - x) ** 2 + (rows - y) ** 2 <= radius**2


MASKS = np.stack([disc(10, 12, 6), disc(20, 16, 9), disc(5, 25, 4), disc(16, 16, 12)])
GUESS = np.stack([disc(13, 12, 6), disc(20, 12, 8), disc(5, 25, 4), disc(12, 16, 3)])


def assert_earlier_prompts_stay(rounds):
    """Each round has the points of the one before, and its mask."""
    for before, after in itertools.pairwise(rounds):
        kept = before.prompts.labels.shape[1]
        assert torch.equal(after.prompts.points_xy_input[:, :kept], before.prompts.points_xy_input)
        assert torch.equal(after.prompts.labels[:, :kept], before.prompts.labels)
        assert torch.equal(after.prompts.masks, before.mask_input)


def test_eleven_rounds_of_sam(play):
    policy = InteractiveSchedule()
    rounds = play(GUESS, MASKS, policy, pause=0.4)
    assert len(rounds) == policy.rounds == 11
    assert policy.num_uniforms == 9
    tokens = [played.prompts.labels.shape[1] for played in rounds]
    assert tokens == [2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10], (
        "a token for each click, none in round 4 and in the last"
    )
    assert [played.index for played in rounds] == list(range(11))
    assert [played.prompts.multimask_output for played in rounds] == [True] + [False] * 10
    assert [played.prompts.masks is None for played in rounds] == [True] + [False] * 10
    assert_earlier_prompts_stay(rounds)


def test_without_pauses_every_round_adds_a_click(play):
    for clicks in (0, 3):
        policy = InteractiveSchedule(clicks=clicks, mask_only_rounds=False)
        rounds = play(GUESS, MASKS, policy, pause=0.4)
        assert len(rounds) == policy.rounds == 1 + clicks
        assert [played.prompts.labels.shape[1] for played in rounds] == list(range(2, 3 + clicks))


def test_each_click_uses_its_own_random_numbers_wherever_the_mask_only_round_is(play):
    points = [
        play(GUESS, MASKS, InteractiveSchedule(), pause=pause)[-1].prompts.points_xy_input
        for pause in (0.0, 0.5, 0.999)
    ]
    assert torch.equal(points[0], points[1])
    assert torch.equal(points[0], points[2])
    assert len(torch.unique(points[0][3, 2:], dim=0)) > 5, (
        "the large error region is not clicked at one place"
    )


@pytest.mark.slow
def test_the_pause_falls_evenly_before_each_of_the_eight_clicks(play):
    def place(pause):
        rounds = play(GUESS[:1], MASKS[:1], InteractiveSchedule(), pause=pause)
        tokens = [played.prompts.labels.shape[1] for played in rounds]
        return next(i for i in range(1, 11) if tokens[i] == tokens[i - 1])

    found = [place(pause) for pause in (0.0, 0.1249, 0.125, 0.5, 0.8749, 0.875, 1 - 2**-53)]
    assert found == [1, 1, 2, 5, 7, 8, 8]


@pytest.mark.slow
def test_a_point_or_a_box_is_drawn_for_each_mask(make_truth, repeat, make_draws):
    truth, draws = repeat(make_truth(MASKS[:1]), 10_000), make_draws(10_000)
    for share in (0.5, 0.2, 0.0, 1.0):
        asked = InteractiveSchedule(box_prob=share).next(None, truth, draws, 0.0)
        boxed = asked.labels[:, 0] == 2
        assert torch.equal(boxed, draws.first_prompt < share), "each mask by its own number"
        assert (asked.labels[boxed] == torch.tensor([2, 3])).all()
        assert (asked.labels[~boxed] == torch.tensor([1, -1])).all()
        assert (asked.points_xy_input[~boxed, 1] == 0).all()
    moved = asked.points_xy_input.flatten(1) - truth.boxes_input
    assert torch.allclose(moved.std(0), torch.full((4,), 5.2), rtol=0.03), (
        "13 cells of 4 pixels: a tenth is 5.2"
    )


def test_a_part_of_the_masks_is_corrected_and_each_is_chosen_alone(make_draws):
    policy = InteractiveSchedule(corrected=0.3, box_prob=0.4)
    draws = make_draws(20_000)
    (corrected, all_rounds), (boxes, box_alone), (points, point_alone) = policy.groups(draws)
    assert torch.equal(corrected.int() + boxes.int() + points.int(), torch.ones_like(boxes.int()))
    is_box = draws.first_prompt < 0.4
    for chosen, part in ((corrected, 0.3), (boxes, 0.7 * 0.4), (points, 0.7 * 0.6)):
        assert float(chosen.float().mean()) == pytest.approx(part, abs=0.015)
    assert float(is_box[corrected].float().mean()) == pytest.approx(0.4, abs=0.03)
    assert is_box[boxes].all()
    assert not is_box[points].any()
    assert all_rounds == replace(policy, corrected=1.0)
    assert (box_alone.rounds, box_alone.box_prob, box_alone.multimask) == (1, 1.0, False)
    assert (point_alone.rounds, point_alone.box_prob, point_alone.multimask) == (1, 0.0, True)
    per_mask = draws.first_prompt, draws.clicks, draws.box_noise
    some = RandomInputs(*[values[5000:] for values in per_mask], draws.drop_path)
    for (chosen, _), (again, _) in zip(policy.groups(draws), policy.groups(some), strict=True):
        assert torch.equal(chosen[5000:], again)
    assert replace(policy, corrected=1.0).groups(draws) == [(None, replace(policy, corrected=1.0))]


def test_prediction_with_the_highest_predicted_iou_is_fed_back(make_truth, make_draws):
    truth = make_truth(MASKS)
    logits = torch.stack(
        [torch.full((4, 32, 32), float(k)) for k in (-5, 5, -7)], 1
    ).requires_grad_()
    iou = torch.tensor([[0.1, 0.9, 0.3], [0.8, 0.2, 0.1], [0.1, 0.2, 0.3], [0.5, 0.6, 0.1]])
    policy, draws = InteractiveSchedule(), make_draws(4)
    first = PromptRound(
        0, policy.next(None, truth, draws, 0.9), Prediction(logits, iou, logits * 10)
    )
    asked = policy.next(first, truth, draws, 0.9)
    assert asked.masks[:, 0, 0].tolist() == [50, -50, -70, 50]
    assert not asked.masks.requires_grad
    assert asked.labels[:, 2].tolist() == [0, 1, 1, 0], (
        "a full guess has false alarms only, an empty one misses only"
    )


@pytest.mark.parametrize(
    "policy", [InteractiveSchedule(), TwoSidedCorrection(), MixedPrompts(), UniformClicks(6)]
)
def test_too_few_draws_are_refused(make_truth, make_draws, policy):
    truth, needed = make_truth(MASKS), policy.num_uniforms
    for draws, given in ((make_draws(4, clicks=needed - 1), needed - 1), (None, 0)):
        message = rf"^{type(policy).__name__} .*{needed}.*\(got {given}\).*RandomSpec.clicks"
        with error_line(message):
            policy.next(None, truth, draws, 0.0)
