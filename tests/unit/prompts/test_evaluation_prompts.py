"""The policies of evaluation: centre clicks and the exact box.

That centre clicks follow the published rule is in tests/parity/test_clicker.py.
"""

import numpy as np
import pytest
import torch

from gigamask.prompts.schedule import BoxPrompt, CenterClicks, UniformClicks


def rectangle(y0, y1, x0, x1, shape=(20, 30)):
    mask = np.zeros(shape, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def test_without_an_error_the_click_confirms_until_nothing_is_left(play):
    dot = rectangle(0, 1, 1, 2, (2, 2))[None]
    last = play(dot, dot, CenterClicks(clicks=6))[-1].prompts
    cells = ((last.points_xy_input[0] + 0.5) / 4).int().tolist()
    assert cells[0] == [1, 0]
    assert sorted(cells[:4]) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert last.labels[0].tolist() == [1, 0, 0, 0, -1, -1, -1]


@pytest.mark.parametrize("feed", [True, False])
def test_tokens_are_the_points_and_one_padding(play, feed):
    truth = np.stack([rectangle(2, 18, 4, 14), rectangle(0, 5, 0, 9)])
    guess = np.stack([rectangle(2, 18, 9, 14), rectangle(0, 5, 3, 12)])
    rounds = play(guess, truth, CenterClicks(feed_mask=feed))
    assert len(rounds) == CenterClicks().rounds == 9
    assert [p.prompts.multimask_output for p in rounds] == [True] + [False] * 8
    assert [p.prompts.masks is not None for p in rounds] == [False] + [feed] * 8
    for index, played in enumerate(rounds):
        labels = played.prompts.labels
        assert labels.shape == (2, index + 2)
        assert (labels[:, -1] == -1).all()
        assert (labels[:, :-1] >= 0).all()
        assert (played.prompts.points_xy_input[:, -1] == 0).all()
    assert CenterClicks().num_uniforms == 0


@pytest.mark.parametrize(
    "multimask, expected",
    [("first", [True, False, False]), ("always", [True] * 3), ("never", [False] * 3)],
)
def test_three_masks_are_wanted_first_always_or_never(play, multimask, expected):
    truth = rectangle(2, 18, 4, 14)[None]
    rounds = play(truth, truth, CenterClicks(3, multimask=multimask))
    assert [played.prompts.multimask_output for played in rounds] == expected


def test_uniform_clicks_are_positive_and_do_not_look_at_the_prediction(play, make_draws):
    masks = np.stack([rectangle(2, 18, 4, 14), rectangle(0, 1, 3, 6)])
    draws = make_draws(2, clicks=4)
    played = [play(guess, masks, UniformClicks(3), draws) for guess in (masks, ~masks)]
    for rounds in played:
        assert [each.prompts.labels.tolist() for each in rounds] == [
            [[1] * count + [-1]] * 2 for count in (1, 2, 3)
        ]
        assert all(each.prompts.multimask_output for each in rounds)
        assert all(each.prompts.masks is None for each in rounds)
        cells = ((rounds[-1].prompts.points_xy_input[:, :-1] + 0.5) / 4).long()
        for mask, points in zip(masks, cells.tolist(), strict=True):
            assert all(mask[y, x] for x, y in points)
    first, second = (rounds[-1].prompts.points_xy_input for rounds in played)
    assert torch.equal(first, second)
    assert torch.equal(first[:, :2], played[0][1].prompts.points_xy_input[:, :-1])
    assert UniformClicks(3).num_uniforms == UniformClicks(3).rounds == 3


@pytest.mark.parametrize("refine", [False, True])
def test_a_box_is_two_exact_corners_which_may_be_refined_with_its_mask(play, refine):
    truth, schedule = rectangle(2, 18, 4, 14)[None], BoxPrompt(refine=refine)
    first, *more = rounds = play(truth, truth, schedule)
    assert (len(rounds), schedule.num_uniforms) == (1 + refine, 0)
    assert schedule.rounds == len(rounds)
    assert first.prompts.masks is None
    assert first.prompts.multimask_output
    for played in rounds:
        assert played.prompts.points_xy_input.tolist() == [[[16, 8], [55, 71]]]
        assert played.prompts.labels.tolist() == [[2, 3]]
    for second in more:
        assert not second.prompts.multimask_output
        assert torch.equal(second.prompts.masks, first.mask_input)
