"""The mix of prompts: every distribution within five standard deviations of its definition."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.prompts.boxes import jitter_boxes
from gigamask.prompts.masks import jitter_masks
from gigamask.prompts.mixed import MixedPrompts
from gigamask.types import RandomInputs
from tests.errors import error_line

NUMBER = 20_000
MASK = np.zeros((1, 14, 14), bool)
MASK[0, 3:9, 4:8] = MASK[0, 7, 2:12] = MASK[0, 12, 12] = True
VALID = np.ones((1, 14, 14), bool)
VALID[0, :, 13] = VALID[0, 13] = False
POINTS = MixedPrompts(point_prob=1.0, box_prob=0.0, mask_prob=0.0)
BOXES = MixedPrompts(point_prob=0.0, box_prob=1.0, mask_prob=0.0)


def within(share, wanted, number):
    """Return whether a fraction of `number` trials is within five standard deviations of its
    probability."""
    return abs(float(share) - wanted) <= 5 * math.sqrt(wanted * (1 - wanted) / number)


def even(places, region):
    """Return whether cells (x, y) are the region's, each as often as another (chi-square, five
    standard deviations)."""
    counts = np.zeros(region.shape)
    np.add.at(counts, (places[:, 1], places[:, 0]), 1)
    expected, freedom = len(places) / region.sum(), region.sum() - 1
    chi = ((counts[region] - expected) ** 2 / expected).sum()
    return counts[~region].sum() == 0 and abs(chi - freedom) <= 5 * math.sqrt(2 * freedom)


def cells(points):
    return ((points + 0.5) / 4 - 0.5).long().numpy()


@pytest.fixture
def many(make_truth, make_draws, repeat):
    """Twenty thousand times the same mask, with draws of their own."""
    return repeat(make_truth(MASK, VALID), NUMBER), make_draws(
        NUMBER, clicks=MixedPrompts().num_uniforms, position=1
    )


@pytest.mark.slow
def test_each_mask_draws_its_own_prompt_kind_with_the_given_probabilities(many):
    for policy in (MixedPrompts(), MixedPrompts(point_prob=0.1, box_prob=0.2, mask_prob=0.3)):
        asked = policy.next(None, *many, 0.0)
        points, boxes = asked.labels[:, 0] == 1, asked.labels[:, 0] == 2
        found = [points, boxes, asked.has_mask_prompt, ~(points | boxes | asked.has_mask_prompt)]
        assert torch.stack(found).sum(0).eq(1).all(), "one kind a mask"
        rest = 1 - policy.point_prob - policy.box_prob - policy.mask_prob
        for kind, share in zip(
            found, (policy.point_prob, policy.box_prob, policy.mask_prob, rest), strict=True
        ):
            assert within(kind.float().mean(), share, NUMBER)
        assert asked.labels.shape == (NUMBER, 6)
        assert (asked.labels[:, -1] == -1).all()
        assert (asked.labels[~(points | boxes)] == -1).all(), "a mask or nothing has padding only"
        assert (asked.labels[boxes] == torch.tensor([2, 3, -1, -1, -1, -1])).all()
        assert (asked.points_xy_input[asked.labels == -1] == 0).all()
        given = (asked.labels >= 0).sum(1)
        assert torch.equal(asked.token_mask.sum(1), given + points.long()), (
            "as a predictor sends them: points and one padding point, corners, nothing"
        )
        assert torch.equal(asked.token_mask[:, -1], points)
        assert (asked.token_mask >= (asked.labels >= 0)).all()
        assert asked.multimask_output


@pytest.mark.slow
def test_the_numbers_of_points_and_of_positive_ones(many):
    asked = POINTS.next(None, *many, 0.0)
    count = (asked.labels >= 0).sum(1)
    positive = (asked.labels == 1).sum(1)
    assert (asked.labels[:, 0] == 1).all()
    for n, odds in enumerate(POINTS.point_count_probs, 1):
        having = count == n
        assert within(having.float().mean(), odds, NUMBER)
        assert (asked.labels[having, :n] >= 0).all()
        for k in range(1, n + 1):
            assert within((positive[having] == k).float().mean(), 1 / n, int(having.sum())), (
                "from one to all, equally likely"
            )
    assert asked.masks is None
    assert asked.has_mask_prompt is None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_each_further_point_is_positive_with_the_given_probability(many, share):
    asked = replace(POINTS, positive_prob=share, point_count_probs=(0.1, 0.2, 0.3, 0.4)).next(
        None, *many, 0.0
    )
    count = (asked.labels >= 0).sum(1)
    assert asked.labels.shape == (NUMBER, 5)
    assert (asked.labels[:, 0] == 1).all()
    for place in range(1, 4):
        there = count > place
        assert within(there.float().mean(), (0.9, 0.7, 0.4)[place - 1], NUMBER)
        assert within((asked.labels[there, place] == 1).float().mean(), share, int(there.sum()))
    both = asked.labels[count == 4][:, 1:3].float()
    if 0 < share < 1:
        assert abs(torch.corrcoef(both.T)[0, 1]) < 5 / len(both) ** 0.5, "each by itself"


@pytest.mark.slow
def test_points_are_uniform_in_the_mask_and_in_the_background_and_never_in_padding(many):
    asked = replace(POINTS, point_count_probs=(0.0, 0.0, 0.0, 0.0, 1.0)).next(None, *many, 0.0)
    assert (asked.labels[:, :5] >= 0).all()
    for place in range(5):
        at, labels = cells(asked.points_xy_input[:, place]), asked.labels[:, place].numpy()
        assert even(at[labels == 1], MASK[0])
        if place:
            assert even(at[labels == 0], ~MASK[0] & VALID[0])
    flat = asked.points_xy_input[asked.labels[:, 4] == 1][:, :5].flatten(1)
    apart = torch.corrcoef(flat.T).abs() * (
        1 - torch.eye(5).repeat_interleave(2, 0).repeat_interleave(2, 1)
    )
    assert apart.max() < 5 / len(flat) ** 0.5, "each place by itself"


def test_mask_prompt_is_the_target_moved_with_its_noisy_box(make_truth, make_draws, repeat):
    truth, draws = repeat(make_truth(MASK, VALID), 500), make_draws(500)
    policy = MixedPrompts(
        point_prob=0.0,
        box_prob=0.0,
        mask_prob=1.0,
        mask_logit=6.0,
        box_noise_limit_px=4.0,
        multimask_output=False,
    )
    asked = policy.next(None, truth, draws, 0.0)
    box = jitter_boxes(truth, draws, 0.1, 4.0)
    boxed = replace(BOXES, box_noise_limit_px=4.0).next(None, truth, draws, 0.0)
    assert torch.equal(boxed.points_xy_input[:, :2].flatten(1), box)
    assert torch.equal(asked.masks, jitter_masks(truth, box, 6.0))
    assert asked.has_mask_prompt.all()
    assert not asked.multimask_output
    assert set(asked.masks.unique().tolist()) == {-6.0, 6.0}
    agree = (asked.masks > 0) == truth.masks
    assert 0.9 < agree.float().mean() < 1, "near the truth, but not it"
    still = replace(policy, box_noise=0.0).next(None, truth, draws, 0.0)
    assert torch.equal(still.masks > 0, truth.masks)


def test_grid_of_mask_prompts_may_be_coarser_than_the_targets(make_truth, make_draws):
    truth = make_truth(np.ones((3, 32, 32), bool), mask_prompt_size=8)
    assert MixedPrompts().next(None, truth, make_draws(3), 0.0).masks.shape == (3, 8, 8)


@pytest.mark.slow
def test_same_random_numbers_give_the_same_prompts_independent_of_other_masks(many):
    truth, draws = many
    whole = MixedPrompts().next(None, truth, draws, 0.0)
    part = torch.arange(70, 90)
    per_mask = draws.first_prompt, draws.clicks, draws.box_noise
    few = RandomInputs(*[values[part] for values in per_mask], draws.drop_path)
    again = MixedPrompts().next(None, truth.select(part), few, 0.7)
    assert torch.equal(again.points_xy_input, whole.points_xy_input[part])
    assert torch.equal(again.labels, whole.labels[part])
    assert torch.equal(again.masks, whole.masks[part])
    assert torch.equal(again.has_mask_prompt, whole.has_mask_prompt[part])


@pytest.mark.parametrize(
    "odds, spent", [((1.0,), 2), ((0.5, 0.5), 3), ((0.4, 0.3, 0.15, 0.1, 0.05), 8)]
)
def test_it_says_how_many_draws_it_spends_and_spends_them(
    make_truth, make_draws, repeat, odds, spent
):
    policy = MixedPrompts(point_count_probs=odds)
    assert policy.num_uniforms == spent
    truth, draws = repeat(make_truth(MASK), 400), make_draws(400, spent + 2, spent)
    enough, longer = (
        policy.next(None, truth, replace(draws, clicks=draws.clicks[:, :given]), 0.0)
        for given in (spent, spent + 2)
    )
    assert torch.equal(enough.labels, longer.labels), "further draws change nothing"
    assert torch.equal(enough.points_xy_input, longer.points_xy_input)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"mask_prob": 0.4}, "point_prob, box_prob and mask_prob.*1.2"),
        ({"point_count_probs": (0.5, 0.4)}, "point_count_probs.*0.9"),
        ({"point_count_probs": ()}, r"point_count_probs.*\(got 0\)"),
        (
            {"point_count_probs": (-0.1, 1.0)},
            r"point_count_probs must be between 0 and 1 \(got -0.1\)",
        ),
    ],
)
def test_impossible_mixes_are_refused(values, message):
    with error_line(rf"MixedPrompts\.{message}"):
        MixedPrompts(**values)


def test_probabilities_may_sum_to_one_up_to_rounding():
    assert 0.33 + 0.56 + 0.11 > 1
    assert MixedPrompts(point_prob=0.33, box_prob=0.56, mask_prob=0.11).mask_prob == 0.11
