import numpy as np
import torch

from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from tests.unit.prompts.test_schedule import assert_earlier_prompts_stay


def rectangle(y0, y1, x0, x1):
    mask = np.zeros((16, 16), bool)
    mask[y0:y1, x0:x1] = True
    return mask


MASKS = np.stack(
    [rectangle(2, 9, 3, 10), rectangle(4, 6, 4, 6), rectangle(1, 15, 1, 15), rectangle(5, 9, 5, 9)]
)
GUESS = np.stack(
    [rectangle(4, 12, 5, 13), rectangle(4, 8, 4, 8), rectangle(3, 9, 3, 9), rectangle(5, 9, 5, 9)]
)  # both, alarms, misses, none


def test_eight_rounds_of_which_seven_add_two_points(play):
    policy = TwoSidedCorrection()
    assert (policy.rounds, policy.num_uniforms) == (8, 15)
    rounds = play(GUESS, MASKS, policy, pause=0.3)
    assert [played.prompts.labels.shape for played in rounds] == [(4, 2 + 2 * n) for n in range(8)]
    assert [played.prompts.multimask_output for played in rounds] == [True] + [False] * 7
    assert rounds[0].prompts.masks is None
    assert_earlier_prompts_stay(rounds)
    assert all(played.prompts.has_mask_prompt is None for played in rounds)


def test_the_first_round_is_the_interactive_schedules(make_truth, make_draws):
    truth, draws = make_truth(MASKS), make_draws(4, clicks=15)
    for share in (0.0, 0.5, 1.0):
        mine, other = (
            policy(box_prob=share).next(None, truth, draws, 0.0)
            for policy in (TwoSidedCorrection, InteractiveSchedule)
        )
        assert torch.equal(mine.points_xy_input, other.points_xy_input)
        assert torch.equal(mine.labels, other.labels)


def test_labels_are_those_of_the_sides_and_an_empty_side_is_padding(play):
    last = play(GUESS, MASKS, TwoSidedCorrection())[-1].prompts
    positive, negative = last.labels[:, 2::2], last.labels[:, 3::2]
    assert [set(row.tolist()) for row in positive] == [{1}, {-1}, {1}, {1}], (
        "without an error the first point confirms"
    )
    assert [set(row.tolist()) for row in negative] == [{0}, {0}, {-1}, {-1}]
    assert (last.points_xy_input[last.labels == -1] == 0).all()
    assert torch.equal(last.token_mask[:, 2:], last.labels[:, 2:] >= 0), "and is not attended to"
    assert last.token_mask[:, :2].all(), "the first round's padding point stays"
    at = ((last.points_xy_input[:, 2:] + 0.5) / 4 - 0.5).long()
    for m, region in enumerate((MASKS & ~GUESS) | (GUESS & ~MASKS)):
        there = at[m][last.labels[m, 2:] >= 0]
        assert (region if region.any() else MASKS[m])[there[:, 1], there[:, 0]].all()
    assert len(torch.unique(at[2, ::2], dim=0)) > 3, "each round spends a draw of its own"


def test_without_corrections_there_is_the_first_round(play):
    policy = TwoSidedCorrection(corrections=0)
    assert len(play(GUESS, MASKS, policy)) == policy.rounds == policy.num_uniforms == 1
