import itertools

import numpy as np
import pytest
import torch

from gigamask.errors import GigamaskError
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.prompts.two_sided import TwoSidedCorrection
from gigamask.rng import make_rng
from gigamask.types import RandomInputs


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


def cells(points):
    return ((points + 0.5) / 4 - 0.5).long()


def test_eight_rounds_of_which_seven_add_two_points(make_truth, make_draws, answer):
    policy = TwoSidedCorrection()
    assert (policy.rounds, policy.num_uniforms) == (8, 15)
    rounds = list(
        run_rounds(answer(GUESS), make_truth(MASKS), policy, make_draws(4, clicks=15), 0.3)
    )
    assert [played.prompts.labels.shape for played in rounds] == [(4, 2 + 2 * n) for n in range(8)]
    assert [played.prompts.multimask_output for played in rounds] == [True] + [False] * 7
    assert rounds[0].prompts.masks is None
    for before, after in itertools.pairwise(rounds):
        kept = before.prompts.labels.shape[1]
        assert torch.equal(after.prompts.points_xy_input[:, :kept], before.prompts.points_xy_input)
        assert torch.equal(after.prompts.labels[:, :kept], before.prompts.labels)
        assert torch.equal(after.prompts.masks, before.mask_input)
        assert after.prompts.has_mask_prompt is None


def test_the_first_round_is_the_interactive_schedules(make_truth, make_draws):
    truth, draws = make_truth(MASKS), make_draws(4, clicks=15)
    for share in (0.0, 0.5, 1.0):
        mine, other = (
            policy(box_prob=share).next(None, truth, draws, 0.0)
            for policy in (TwoSidedCorrection, InteractiveSchedule)
        )
        assert torch.equal(mine.points_xy_input, other.points_xy_input)
        assert torch.equal(mine.labels, other.labels)


def test_labels_are_those_of_the_sides_and_an_empty_side_is_padding(make_truth, make_draws, answer):
    last = list(
        run_rounds(
            answer(GUESS), make_truth(MASKS), TwoSidedCorrection(), make_draws(4, clicks=15), 0.0
        )
    )[-1].prompts
    positive, negative = last.labels[:, 2::2], last.labels[:, 3::2]
    assert [set(row.tolist()) for row in positive] == [{1}, {-1}, {1}, {1}], (
        "without an error the first point confirms"
    )
    assert [set(row.tolist()) for row in negative] == [{0}, {0}, {-1}, {-1}]
    assert (last.points_xy_input[last.labels == -1] == 0).all()
    assert torch.equal(last.token_mask[:, 2:], last.labels[:, 2:] >= 0), "and is not attended to"
    assert last.token_mask[:, :2].all(), "the first round's padding point stays"
    at = cells(last.points_xy_input[:, 2:])
    for m, region in enumerate((MASKS & ~GUESS) | (GUESS & ~MASKS)):
        there = at[m][last.labels[m, 2:] >= 0]
        assert (region if region.any() else MASKS[m])[there[:, 1], there[:, 0]].all()
    assert len(torch.unique(at[2, ::2], dim=0)) > 3, "each round spends a draw of its own"


@pytest.mark.slow
def test_both_sides_are_uniform_in_every_round(make_truth, repeat, answer):
    number = 20_000
    truth = repeat(make_truth(MASKS[:1]), number)
    policy = TwoSidedCorrection(corrections=3)
    clicks = torch.tensor(
        make_rng(0, "test sides").random((number, policy.num_uniforms, 2)), dtype=torch.float32
    )
    draws = RandomInputs(torch.ones(number), clicks, torch.zeros(number, 4), torch.zeros(1, 1, 2))
    guess = torch.as_tensor(GUESS[:1]).expand(number, 16, 16)
    last = list(run_rounds(answer(guess), truth, policy, draws, 0.0))[-1].prompts
    assert (last.labels[:, 2:] == torch.tensor([1, 0] * 3)).all()
    for token in range(2, 8):
        region = (MASKS[0] & ~GUESS[0]) if token % 2 == 0 else (GUESS[0] & ~MASKS[0])
        counts = np.zeros((16, 16))
        at = cells(last.points_xy_input[:, token]).numpy()
        np.add.at(counts, (at[:, 1], at[:, 0]), 1)
        expected, freedom = number / region.sum(), region.sum() - 1
        assert counts[~region].sum() == 0
        assert (
            abs(((counts[region] - expected) ** 2 / expected).sum() - freedom)
            < 5 * (2 * freedom) ** 0.5
        )
    apart = torch.corrcoef(last.points_xy_input[:, 2:].flatten(1).T).abs() * (
        1 - torch.eye(6).repeat_interleave(2, 0).repeat_interleave(2, 1)
    )
    assert apart.max() < 5 / number**0.5, "each point by itself"


def test_without_corrections_there_is_the_first_round(make_truth, make_draws, answer):
    policy = TwoSidedCorrection(corrections=0)
    assert (
        len(
            list(run_rounds(answer(GUESS), make_truth(MASKS), policy, make_draws(4, clicks=1), 0.0))
        )
        == policy.rounds
        == policy.num_uniforms
        == 1
    )


def test_too_few_draws_are_refused(make_truth, make_draws):
    message = r"TwoSidedCorrection.*15.*\(got 9\).*RandomSpec.clicks"
    with pytest.raises(GigamaskError, match=message):
        TwoSidedCorrection().next(None, make_truth(MASKS), make_draws(4, clicks=9), 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("corrections", -1),
        ("box_prob", 1.5),
        ("box_noise", -0.1),
        ("box_noise_limit_px", -1.0),
    ],
)
def test_impossible_corrections_are_refused(name, value):
    with pytest.raises(GigamaskError, match=rf"TwoSidedCorrection\.{name} is {value}"):
        TwoSidedCorrection(**{name: value})
