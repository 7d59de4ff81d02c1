"""Edges of automatic masks of models whose answers are known."""

import numpy as np
import pytest
import torch
from torch import nn

from gigamask.contracts import Entry
from gigamask.evaluate import edges
from gigamask.evaluate.automatic_edges import Edges, Protocol, drawn, grid_masks, reduced, table
from gigamask.evaluate.scenes import Scene
from gigamask.geometry.boundary import outline
from gigamask.geometry.frame import Frame
from gigamask.geometry.runs import Runs
from gigamask.model.sam import Sam
from tests.rooms.evaluate.test_edges import scored

GRID = 64
FEW = Protocol(points_per_side=2, counts=edges.Protocol(thresholds=5, tolerance=0.02))


def scene(masks: np.ndarray) -> Scene:
    """An image that holds these masks."""
    size = masks.shape[1:]
    none = np.zeros(len(masks), np.float32)
    entry = Entry("one", size, Runs.from_dense(masks), none, none)
    return Scene(np.zeros((*size, 3), np.uint8), entry, Frame.whole(size, 4 * GRID), torch.zeros(1, 1, 1, 1))


def square(side: int, start: int, stop: int) -> np.ndarray:
    mask = np.zeros((side, side), bool)
    mask[start:stop, start:stop] = True
    return mask


class Finding(Sam):
    """Finds the same three masks of `GRID` pixels wherever it is asked."""

    def __init__(self, *masks: np.ndarray) -> None:
        nn.Module.__init__(self)
        self.low = torch.from_numpy(np.where(masks, 8.0, -8.0)).float()

    def decode(self, embedding, mask_image, prompts):
        count = len(mask_image)
        return self.low.expand(count, -1, -1, -1), torch.tensor([0.1, 0.2, 0.3]).expand(count, -1)


def test_of_equal_boxes_one_mask_stays_and_empty_ones_do_not():
    nothing = square(GRID, 0, 0)
    found = list(grid_masks(Finding(square(GRID, 10, 30), square(GRID, 10, 30), nothing), scene(square(GRID, 0, 1)[None]), FEW))
    assert len(found) == 1
    mask, logits = found[0]
    assert np.array_equal(mask, square(GRID, 10, 30))
    assert np.array_equal(mask, logits > 0)
    assert list(grid_masks(Finding(nothing, nothing, nothing), scene(square(GRID, 0, 1)[None]), FEW)) == []


@scored
def test_found_where_drawn_scores_and_elsewhere_not():
    there, elsewhere, small = square(GRID, 10, 30), square(GRID, 40, 60), square(GRID, 0, 0)
    right, wrong = Edges(FEW), Edges(FEW)
    right.look(Finding(there, small, small), scene(there[None]), np.array([0]))
    wrong.look(Finding(elsewhere, small, small), scene(there[None]), np.array([0]))
    assert right.summary()["ODS"] > 0.95
    assert wrong.summary()["ODS"] == 0
    both = Edges.joined([right, wrong]).summary()
    assert both["images"] == 2
    assert 0 < both["ODS"] < right.summary()["ODS"]
    assert both["protocol"]["name"].startswith("approximate edges")
    assert both["protocol"]["counts"]["thresholds"] == 5
    assert "ODS 0." in table(both)


def test_only_the_masks_that_are_asked_for_are_drawn():
    masks = np.stack([square(GRID, 10, 30), square(GRID, 20, 50)])
    assert np.array_equal(drawn(Runs.from_dense(masks), (GRID, GRID)), outline(masks[0]) | outline(masks[1]))


@scored
def test_large_images_are_scored_smaller():
    large = scene(np.kron(square(GRID, 10, 30), np.ones((16, 16), bool))[None])
    assert reduced(large, 2000) is large
    assert reduced(large, 64).frame.original == (64, 64)
    assert np.array_equal(drawn(large.entry.masks, (64, 64)), outline(square(GRID, 10, 30)))
    model, small = Finding(square(GRID, 10, 30), square(GRID, 0, 0), square(GRID, 0, 0)), Edges(FEW)
    small.look(model, scene(square(GRID, 10, 30)[None]), np.array([0]))
    again = Edges(Protocol(points_per_side=2, longest_px=GRID, counts=FEW.counts))
    again.look(model, large, np.array([0]))
    assert {name: again.summary()[name] for name in ("ODS", "OIS", "AP")} == pytest.approx(
        {name: small.summary()[name] for name in ("ODS", "OIS", "AP")}, abs=0.02
    )
