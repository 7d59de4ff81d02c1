"""Where the windows of prompts are, and what the maps say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gigamask.models.compact.prompt_maps import (
    BOX,
    CLICK,
    CORRECTION,
    PRIOR_RANGE,
    PromptShapes,
    WindowPrompts,
    likeness,
    propagated,
)
from gigamask.models.configs import WindowDecoder
from gigamask.types import Prompts

SIDE, MASK_SIDE = 128, 32
CONFIG = WindowDecoder(click_windows=(0.25, 0.5, 1.0))


def shapes(points: list, labels: list, **changes) -> PromptShapes:
    """Return the shapes of one prompt."""
    prompts = Prompts(
        torch.tensor([points], dtype=torch.float32).reshape(1, -1, 2),
        torch.tensor([labels], dtype=torch.int64),
        None,
        True,
    )
    return PromptShapes.from_prompts(replace(prompts, **changes))


def windows(found: PromptShapes, masks: Tensor | None = None) -> Tensor:
    """Return the three windows of one prompt."""
    return found.windows(masks, CONFIG, SIDE)[0]


def contains(window: Tensor, x0: float, y0: float, x1: float, y1: float) -> bool:
    left, top, right, bottom = window.tolist()
    return left <= x0 and top <= y0 and x1 <= right and y1 <= bottom


def test_windows_of_a_click_have_it_in_their_center():
    """Also at the border; the center of pixel 30 is at 30.5."""
    for x, y in ((30.0, 70.0), (0.0, 127.0)):
        found = windows(shapes([[x, y], [0, 0]], [1, -1]))
        assert (found[:, :2] + found[:, 2:]).tolist() == [[2 * x + 1, 2 * y + 1]] * 3
        assert (found[:, 2:] - found[:, :2]).tolist() == [[32, 32], [64, 64], [128, 128]]


def test_several_clicks_are_in_each_window_and_foreground_counts():
    two = windows(shapes([[10, 20], [90, 40]], [1, 1]))
    assert all(contains(window, 10.5, 20.5, 90.5, 40.5) for window in two)
    assert (two[0, :2] + two[0, 2:]).tolist() == [101, 61]
    alone = windows(shapes([[10, 20]], [1]))
    assert torch.equal(windows(shapes([[10, 20], [90, 40]], [1, 0])), alone)
    assert torch.equal(windows(shapes([[10, 20]], [0])), windows(shapes([[10, 20]], [1]))), (
        "background clicks are all there is"
    )


def test_windows_of_a_box_contain_it():
    found = windows(shapes([[10, 20], [49, 99]], [2, 3]))
    sides = found[:, 2:] - found[:, :2]
    assert all(contains(window, 10.5, 20.5, 49.5, 99.5) for window in found)
    assert torch.allclose(
        sides, torch.tensor([[39.0, 79.0]]) * torch.tensor([CONFIG.box_windows]).T
    )
    assert torch.allclose((found[:, :2] + found[:, 2:]) / 2, torch.tensor([30.0, 60.0]))
    assert torch.equal(windows(shapes([[10, 20], [49, 99], [120, 120]], [2, 3, 1])), found), (
        "a click beside a box does not move it"
    )


def test_narrow_and_small_boxes_have_wider_windows():
    narrow = windows(shapes([[10, 20], [10, 99]], [2, 3]))
    sides = narrow[:, 2:] - narrow[:, :2]
    assert torch.allclose(sides[:, 0], 0.35 * sides[:, 1])
    point = windows(shapes([[10, 20], [10, 20]], [2, 3]))
    assert torch.allclose(point[:, 2:] - point[:, :2], torch.full((3, 2), 0.05 * SIDE))


def test_no_prompt_is_asked_of_the_whole_image():
    for found in (
        shapes([], []),
        shapes([[3, 4]], [-1]),
        shapes([[3, 4]], [1], token_mask=torch.tensor([[False]])),
    ):
        assert windows(found).tolist() == [[0, 0, SIDE, SIDE]] * 3
        assert found.kinds.tolist() == [[CLICK, CLICK + 1, CLICK + 2]]


def logits(x0: int, y0: int, x1: int, y1: int) -> Tensor:
    """Return a mask prompt whose foreground are the cells of 4 pixels from x0, y0 to x1, y1."""
    masks = torch.full((1, MASK_SIDE, MASK_SIDE), -3.0)
    masks[:, y0:y1, x0:x1] = 2.0
    return masks


def test_windows_of_a_correction_contain_mask_and_foreground_clicks():
    masks = logits(5, 6, 10, 9)
    found = windows(shapes([[100, 30], [3, 120]], [1, 0], masks=masks), masks)
    assert all(contains(window, 20, 24, 100.5, 36) for window in found)
    sides = found[:, 2:] - found[:, :2]
    assert torch.allclose(sides[:, 0], 80.5 * torch.tensor(CONFIG.correction_windows)), (
        "the background click does not count"
    )
    alone = windows(shapes([], [], masks=masks), masks)
    assert torch.allclose((alone[:, :2] + alone[:, 2:]) / 2, torch.tensor([30.0, 30.0]))


def test_an_empty_mask_prompt_leaves_the_other_prompts():
    masks = logits(0, 0, 0, 0)
    for points, labels in (([[30, 70]], [1]), ([[10, 20], [49, 99]], [2, 3]), ([], [])):
        found = shapes(points, labels, masks=masks)
        assert torch.equal(windows(found, masks), windows(shapes(points, labels)))
        assert found.kinds.tolist() == [[CORRECTION] * 3]


def test_tokens_that_pad_are_not_read():
    """Neither SAM's padding point nor tokens of a longer prompt."""
    one = shapes([[30, 70]], [1])
    padded = shapes(
        [[30, 70], [7, 7], [90, 90], [100, 100]],
        [1, -1, 1, 2],
        token_mask=torch.tensor([[True, True, False, False]]),
    )
    assert torch.equal(windows(padded), windows(one))
    assert padded.positive.tolist() == [[True, False, False, False]]
    assert not padded.has_box
    maps = [
        WindowPrompts.from_shapes(each, each.windows(None, CONFIG, SIDE)).maps(None, 16)
        for each in (one, padded)
    ]
    assert torch.equal(*maps)


def test_kinds_and_windows_of_a_batch_are_those_of_each():
    points = torch.tensor([[[9.0, 9], [0, 0]], [[8, 8], [40, 60]], [[70, 70], [30, 20]]])
    labels = torch.tensor([[1, -1], [2, 3], [1, 0]])
    masks = logits(5, 6, 10, 9).repeat(3, 1, 1)
    has_mask = torch.tensor([False, False, True])
    prompts = Prompts(points, labels, masks, True, has_mask)
    batch = PromptShapes.from_prompts(prompts)
    assert batch.kinds.tolist() == [[CLICK, CLICK + 1, CLICK + 2], [BOX] * 3, [CORRECTION] * 3]
    found = batch.windows(masks, CONFIG, SIDE)
    for m in range(3):
        own = masks[m : m + 1] if has_mask[m] else None
        alone = Prompts(points[m : m + 1], labels[m : m + 1], own, True)
        assert torch.equal(found[m], PromptShapes.from_prompts(alone).windows(own, CONFIG, SIDE)[0])


@pytest.fixture
def box() -> WindowPrompts:
    """A box of 40 x 80 pixels in the first of three windows, 1.2 times as large."""
    found = shapes([[9.5, 19.5], [49.5, 99.5], [19.5, 39.5]], [2, 3, 1])
    return WindowPrompts.from_shapes(found, found.windows(None, CONFIG, SIDE)[:, :1])


def test_positions_are_fractions_of_the_window(box):
    assert torch.allclose(box.center, torch.tensor([[0.5, 0.5]]))
    assert torch.allclose(box.radius, torch.tensor([[1 / 2.4, 1 / 2.4]]))
    assert torch.allclose(box.points[0, 2], torch.tensor([(10 + 4) / 48, (20 + 8) / 96]))


def test_prior_is_the_ellipse_of_a_box_or_the_disc_of_a_click(box):
    centers = (torch.arange(32) + 0.5) / 32 - 0.5
    distance = (centers.square() + centers[:, None].square()).sqrt()
    disc = shapes([[50, 50]], [1])
    click = WindowPrompts.from_shapes(disc, disc.windows(None, CONFIG, SIDE)[:, :1])
    for prompts, radius in ((box, 1 / 2.4), (click, 0.22)):
        (prior,) = prompts.prior(None, 32)
        assert torch.equal(prior > 0, distance < 1.05 * radius)
        assert float(prior.max()) == PRIOR_RANGE[1]
        corner = 4 * (1.05 - float(distance[0, 0]) / radius)
        assert float(prior[0, 0]) == pytest.approx(max(PRIOR_RANGE[0], corner), rel=1e-5)
    fed = torch.linspace(-9, 9, 1024).view(1, 32, 32)
    assert torch.equal(box.prior(fed, 32), box.prior(None, 32)), "it has no mask prompt"
    corrected = replace(box, has_mask=torch.tensor([True]))
    assert torch.equal(corrected.prior(fed, 32), fed.clamp(-3, 3))


def test_maps_say_where_what_was_prompted(box):
    points = torch.tensor([[[0.25, 0.5], [0.75, 0.125], [0.5, 0.5]]])
    asked = replace(
        box,
        points=points,
        positive=torch.tensor([[True, False, False]]),
        negative=torch.tensor([[False, True, False]]),
    )
    (maps,) = asked.maps(None, 16)
    assert maps.shape == (8, 16, 16)
    rows, columns = (maps[:4].flatten(1).argmax(1) // 16, maps[:4].flatten(1).argmax(1) % 16)
    # The point lies between two samples, of which the first is taken.
    assert all(abs(row - 7.5) < 1 for row in rows[:2].tolist())
    assert all(abs(column - 3.5) < 1 for column in columns[:2].tolist())
    assert all(abs(row - 1.5) < 1 for row in rows[2:].tolist())
    assert all(abs(column - 11.5) < 1 for column in columns[2:].tolist())
    assert maps[1].mean() > 3 * maps[0].mean(), "one narrow, one wide"
    assert maps[3].mean() > 3 * maps[2].mean()
    inside, border = maps[4, 8, 8], maps[4, 0, 8]
    assert inside > 0.99
    assert border < 0.5
    assert maps[5].argmax() in (119, 120, 135, 136)
    assert not maps[6:].any()


def test_maps_of_a_mask_prompt(box):
    fed = torch.linspace(-5, 5, 256).view(1, 16, 16)
    corrected = replace(box, has_mask=torch.tensor([True]))
    (maps,) = corrected.maps(fed, 16)
    assert torch.equal(maps[6], fed[0].sigmoid())
    assert (maps[7] == 1).all()
    (unread,) = box.maps(torch.full_like(fed, float("nan")), 16)
    assert torch.equal(unread, box.maps(None, 16)[0])


def test_without_box_or_click_their_maps_are_zero():
    found = shapes([], [])
    (maps,) = WindowPrompts.from_shapes(found, found.windows(None, CONFIG, SIDE)[:, :1]).maps(
        None, 8
    )
    assert not maps.any()


def test_likeness_is_the_cosine_with_what_is_prompted():
    """Two kinds of features, left and right; the click is left, the prior right."""
    chance = torch.Generator().manual_seed(0)
    left, right = torch.randn((2, 8), generator=chance)
    features = torch.where((torch.arange(4) < 2), left[:, None, None], right[:, None, None])
    features = features.expand(8, 4, 4)[None]
    maps = torch.zeros(1, 8, 4, 4)
    maps[:, 0, 1, 0] = 1
    prior = torch.full((1, 4, 4), -90.0)
    prior[..., 2:] = 90.0
    (found,) = likeness(features, maps, prior)
    cosine = torch.cosine_similarity(left.view(4, 2), right.view(4, 2), dim=1)
    for start, own in ((0, 0), (4, 2), (8, 0)):
        other = 2 - own
        assert torch.allclose(found[start : start + 4, :, own], torch.ones(4, 4), atol=1e-5)
        assert torch.allclose(found[start : start + 4, 3, other], cosine, atol=1e-5)


def test_labels_pass_between_samples_that_are_alike():
    """A prior on half of one kind of features labels all of this kind, and not the other."""
    kind = torch.arange(64).view(8, 8) % 3 == 0
    features = torch.where(kind, torch.ones(4, 1, 1), -torch.ones(4, 1, 1))[None] + 5
    prior = torch.full((1, 8, 8), -90.0)
    prior[:, :4] = torch.where(kind[:4], 90.0, -90.0)
    maps = torch.zeros(1, 8, 8, 8)
    once, twice = propagated(features, maps, prior)[0]
    for step in (once, twice):
        assert step[kind].std() < 1e-5
        assert step[~kind].std() < 1e-5
        assert step[kind].mean() > step[~kind].mean() + 1
    assert torch.allclose(once[~kind], torch.tensor(-2.0), atol=1e-4)

    maps[:, 2, 5, 0], prior = 1.0, torch.full((1, 8, 8), 90.0)
    click = propagated(features, maps, prior)[0, 0]
    assert click[kind[5, 0] == kind].max() < click[kind[5, 0] != kind].min()
