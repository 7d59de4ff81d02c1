"""The policies of evaluation: centre clicks and the exact box."""

import numpy as np
import pytest
import torch

from gigamask.errors import GigamaskError
from gigamask.prompts.clicks import squared_edt
from gigamask.prompts.schedule import BoxPrompt, CenterClicks, UniformClicks


def rectangle(y0, y1, x0, x1, shape=(20, 30)):
    mask = np.zeros(shape, bool)
    mask[y0:y1, x0:x1] = True
    return mask


@pytest.fixture
def clicked(play):
    """Plays one mask, and returns each round's newest click as (x, y, label), in cells."""

    def build(guess, truth, clicks):
        truth = truth[None] if isinstance(truth, np.ndarray) else truth
        newest = [
            (*each.prompts.points_xy_input[0, -2].tolist(), int(each.prompts.labels[0, -2]))
            for each in play(guess[None], truth, CenterClicks(clicks=clicks))
        ]
        return [(int((x + 0.5) / 4), int((y + 0.5) / 4), label) for x, y, label in newest]

    return build


def depth(region):
    """Returns each pixel's distance to the nearest pixel outside, the border counting."""
    return squared_edt(torch.tensor(region[None]))[0].numpy()


def test_first_click_is_deepest_in_the_mask_with_the_image_border_as_boundary(clicked):
    truth = rectangle(0, 9, 0, 21)
    [(x, y, label)] = clicked(truth, truth, 1)
    assert (y, label) == (4, 1)
    assert depth(truth)[y, x] == depth(truth).max() == 25


@pytest.mark.parametrize(
    ("guess", "label"),
    [
        (rectangle(2, 18, 9, 14), 1),  # a miss 5 wide
        (rectangle(2, 18, 4, 21), 0),  # a false alarm 7 wide
        (rectangle(2, 18, 11, 19), 1),  # a miss 7 wide beside a false alarm 5 wide
        (rectangle(2, 18, 9, 21), 0),  # the other way round
        (rectangle(2, 18, 9, 19), 0),  # a tie is negative
    ],
)
def test_false_negatives_and_false_positives_are_measured_separately(clicked, guess, label):
    truth = rectangle(2, 18, 4, 14)
    x, y, found = clicked(guess, truth, 2)[1]
    assert found == label
    region = truth & ~guess if label else guess & ~truth
    assert depth(region)[y, x] == depth(region).max()


def test_no_pixel_is_clicked_twice_if_the_prediction_never_changes(clicked):
    truth = rectangle(2, 6, 3, 8)
    found = clicked(rectangle(10, 12, 10, 12), truth, 9)
    assert len({(x, y) for x, y, _ in found}) == 9
    assert all(label == truth[y, x] for x, y, label in found)


def test_without_an_error_the_click_confirms_until_nothing_is_left(clicked):
    dot, full = rectangle(0, 1, 1, 2, (2, 2)), np.ones((6, 6), bool)
    found = clicked(dot, dot, 6)
    assert found[0] == (1, 0, 1)
    assert {(x, y) for x, y, _ in found[:4]} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert [label for *_, label in found] == [1, 0, 0, 0, -1, -1]
    for mask, label in ((full, 1), (~full, 0)):
        assert [each[2] for each in clicked(mask, mask, 3)] == [label] * 3


def test_padding_is_no_error_and_never_clicked(clicked, make_truth):
    truth, valid = rectangle(2, 18, 4, 14), rectangle(0, 20, 0, 12)
    x, y, label = clicked(truth | ~valid, make_truth(truth[None], valid[None]), 2)[1]
    assert valid[y, x]
    assert label == truth[y, x] == 1


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
    ("multimask", "expected"),
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
    with pytest.raises(GigamaskError, match="UniformClicks needs 5 pairs"):
        play(masks, masks, UniformClicks(5), draws)
    with pytest.raises(GigamaskError, match=r"UniformClicks\.clicks"):
        UniformClicks(0)


def test_a_box_is_refined_with_its_mask(play):
    truth = rectangle(2, 18, 4, 14)[None]
    schedule = BoxPrompt(refine=True)
    first, second = play(truth, truth, schedule)
    assert schedule.rounds == 2
    assert (first.prompts.multimask_output, second.prompts.multimask_output) == (True, False)
    assert first.prompts.masks is None
    assert torch.equal(second.prompts.masks, first.mask_input)
    assert torch.equal(second.prompts.points_xy_input, first.prompts.points_xy_input)


def test_no_masks_play_too(play):
    none = np.zeros((0, 8, 8), bool)
    rounds = play(none, none, CenterClicks(clicks=3))
    assert [played.prompts.labels.shape for played in rounds] == [(0, 2), (0, 3), (0, 4)]


def test_clicks_are_in_input_pixels_of_uneven_cells(play, make_truth):
    truth = rectangle(6, 9, 20, 23)[None]
    [played] = play(truth, make_truth(truth, cell_xy=(2.0, 3.0)), CenterClicks(clicks=1))
    assert played.prompts.points_xy_input[0, 0].tolist() == [21.5 * 2 - 0.5, 7.5 * 3 - 0.5]


def test_a_box_is_one_round_of_two_exact_corners(play):
    truth = rectangle(2, 18, 4, 14)[None]
    [played] = play(truth, truth, BoxPrompt())
    assert played.prompts.points_xy_input.tolist() == [[[16, 8], [55, 71]]]
    assert played.prompts.labels.tolist() == [[2, 3]]
    assert played.prompts.masks is None
    assert played.prompts.multimask_output
    assert (BoxPrompt().rounds, BoxPrompt().num_uniforms) == (1, 0)


def test_centre_clicks_without_a_click_are_refused():
    with pytest.raises(GigamaskError, match=r"^CenterClicks.clicks.*0"):
        CenterClicks(clicks=0)
