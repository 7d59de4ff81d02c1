"""The policies of evaluation: centre clicks and the exact box."""

import numpy as np
import pytest
import torch

from gigamask.errors import GigamaskError
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import BoxPrompt, CenterClicks, UniformClicks
from gigamask.types import Prediction, RandomInputs


def rectangle(y0, y1, x0, x1, shape=(20, 30)):
    mask = np.zeros(shape, bool)
    mask[y0:y1, x0:x1] = True
    return mask


def clicked(played, cell=4.0):
    """Returns each round's newest click of the first mask as (x, y, label), in cells."""
    newest = [(p.prompts.points_xy_input[0, -2], int(p.prompts.labels[0, -2])) for p in played]
    return [(int((xy[0] + 0.5) / cell), int((xy[1] + 0.5) / cell), label) for xy, label in newest]


def depth(region):
    """Returns each pixel's distance to the nearest pixel outside, the border counting, by trying
    all."""
    padded = np.pad(region, 1)
    inside, outside = np.argwhere(padded), np.argwhere(~padded)
    distance = np.zeros(padded.shape)
    for y, x in inside:
        distance[y, x] = np.sqrt(((outside - (y, x)) ** 2).sum(1).min())
    return distance[1:-1, 1:-1]


def test_first_click_is_deepest_in_the_mask_with_the_image_border_as_boundary(make_truth, answer):
    truth = rectangle(0, 9, 0, 21)
    (x, y, label), *_ = clicked(
        run_rounds(answer(truth[None]), make_truth(truth[None]), CenterClicks(clicks=1))
    )
    assert label == 1
    assert depth(truth)[y, x] == depth(truth).max() == 5
    assert y == 4


def test_false_negatives_and_false_positives_are_measured_separately(make_truth, answer):
    truth = rectangle(2, 18, 4, 14)
    for guess, label in [
        (rectangle(2, 18, 9, 14), 1),  # a miss 5 wide
        (rectangle(2, 18, 4, 21), 0),  # a false alarm 7 wide
        (rectangle(2, 18, 11, 19), 1),  # a miss 7 wide beside a false alarm 5 wide
        (rectangle(2, 18, 9, 21), 0),  # the other way round
        (rectangle(2, 18, 9, 19), 0),  # a tie is negative
    ]:
        rounds = list(
            run_rounds(answer(guess[None]), make_truth(truth[None]), CenterClicks(clicks=2))
        )
        x, y, found = clicked(rounds)[1]
        assert found == label
        region = truth & ~guess if label else guess & ~truth
        assert depth(region)[y, x] == depth(region).max()


def test_no_pixel_is_clicked_twice_if_the_prediction_never_changes(make_truth, answer):
    truth = rectangle(2, 6, 3, 8)
    found = clicked(
        run_rounds(
            answer(rectangle(10, 12, 10, 12)[None]), make_truth(truth[None]), CenterClicks(clicks=9)
        )
    )
    assert len({(x, y) for x, y, _ in found}) == 9
    assert all(label == truth[y, x] for x, y, label in found)


def test_without_an_error_the_click_confirms_until_nothing_is_left(make_truth, answer):
    dot = np.zeros((2, 2), bool)
    dot[0, 1] = True
    rounds = list(run_rounds(answer(dot[None]), make_truth(dot[None]), CenterClicks(clicks=6)))
    found = clicked(rounds)
    assert found[0] == (1, 0, 1)
    assert {(x, y) for x, y, _ in found[:4]} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert [label for *_, label in found] == [1, 0, 0, 0, -1, -1]
    full = np.ones((1, 6, 6), bool)
    assert [
        label
        for *_, label in clicked(run_rounds(answer(full), make_truth(full), CenterClicks(clicks=3)))
    ] == [1, 1, 1]
    empty = np.zeros((1, 6, 6), bool)
    assert [
        label
        for *_, label in clicked(
            run_rounds(answer(empty), make_truth(empty), CenterClicks(clicks=3))
        )
    ] == [0, 0, 0]


def test_padding_is_no_error_and_never_clicked(make_truth, answer):
    truth, valid = rectangle(2, 18, 4, 14), rectangle(0, 20, 0, 12)
    x, y, label = clicked(
        run_rounds(
            answer(truth[None] | ~valid),
            make_truth(truth[None], valid[None]),
            CenterClicks(clicks=2),
        )
    )[1]
    assert valid[y, x]
    assert label == 1
    assert truth[y, x]


def test_tokens_are_the_points_and_one_padding(make_truth, answer):
    truth = make_truth(np.stack([rectangle(2, 18, 4, 14), rectangle(0, 5, 0, 9)]))
    decode = answer(np.stack([rectangle(2, 18, 9, 14), rectangle(0, 5, 3, 12)]))
    for feed in (True, False):
        rounds = list(run_rounds(decode, truth, CenterClicks(feed_mask=feed)))
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


def test_three_masks_are_wanted_first_always_or_never(make_truth, answer):
    truth = rectangle(2, 18, 4, 14)[None]
    wanted = {"first": [True, False, False], "always": [True] * 3, "never": [False] * 3}
    for multimask, expected in wanted.items():
        schedule = CenterClicks(3, multimask=multimask)
        rounds = run_rounds(answer(truth), make_truth(truth), schedule)
        assert [played.prompts.multimask_output for played in rounds] == expected


def test_uniform_clicks_are_positive_and_do_not_look_at_the_prediction(make_truth, answer):
    masks = np.stack([rectangle(2, 18, 4, 14), rectangle(0, 1, 3, 6)])
    uniforms = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(0))
    none = torch.zeros(2)
    inputs = RandomInputs(none, uniforms, torch.zeros(2, 4), torch.zeros(1, 0, 2))
    played = [
        list(run_rounds(answer(guess), make_truth(masks), UniformClicks(3), inputs))
        for guess in (masks, ~masks)
    ]
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
        next(run_rounds(answer(masks), make_truth(masks), UniformClicks(5), inputs))
    with pytest.raises(GigamaskError, match=r"UniformClicks\.clicks"):
        UniformClicks(0)


def test_a_box_is_refined_with_its_mask(make_truth, answer):
    truth = rectangle(2, 18, 4, 14)[None]
    schedule = BoxPrompt(refine=True)
    first, second = run_rounds(answer(truth), make_truth(truth), schedule)
    assert schedule.rounds == 2
    assert (first.prompts.multimask_output, second.prompts.multimask_output) == (True, False)
    assert first.prompts.masks is None
    assert torch.equal(second.prompts.masks, first.mask_input)
    assert torch.equal(second.prompts.points_xy_input, first.prompts.points_xy_input)


def test_no_masks_play_too(make_truth, answer):
    none = np.zeros((0, 8, 8), bool)
    rounds = list(run_rounds(answer(none), make_truth(none), CenterClicks(clicks=3)))
    assert [played.prompts.labels.shape for played in rounds] == [(0, 2), (0, 3), (0, 4)]


def test_clicks_are_in_input_pixels_of_uneven_cells(make_truth, answer):
    truth = rectangle(6, 9, 20, 23)
    rounds = list(
        run_rounds(
            answer(truth[None]), make_truth(truth[None], cell_xy=(2.0, 3.0)), CenterClicks(clicks=1)
        )
    )
    assert rounds[0].prompts.points_xy_input[0, 0].tolist() == [21.5 * 2 - 0.5, 7.5 * 3 - 0.5]


def test_a_box_is_one_round_of_two_exact_corners(make_truth):
    truth = make_truth(rectangle(2, 18, 4, 14)[None])
    policy, asked = BoxPrompt(), []

    def decode(prompts):
        asked.append(prompts)
        return Prediction(torch.zeros(1, 3, 20, 30), torch.zeros(1, 3), torch.zeros(1, 3, 8, 8))

    assert len(list(run_rounds(decode, truth, policy))) == policy.rounds == 1
    assert asked[0].points_xy_input.tolist() == [[[16, 8], [55, 71]]]
    assert asked[0].labels.tolist() == [[2, 3]]
    assert asked[0].masks is None
    assert asked[0].multimask_output
    assert policy.num_uniforms == 0


def test_centre_clicks_without_a_click_are_refused():
    with pytest.raises(GigamaskError, match=r"^CenterClicks.clicks.*0"):
        CenterClicks(clicks=0)
