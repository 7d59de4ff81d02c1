"""The next clicks by operations on all masks at once are those of evaluation on a CPU."""

import cv2
import numpy as np
import pytest
import torch

from gigamask.masks.boundary import farthest_point
from gigamask.prompts import farthest
from gigamask.prompts.schedule import CenterClicks
from gigamask.types import Prediction, PromptRound, Targets

NONE = torch.zeros(1, 0, 2, dtype=torch.int64)


def blobs(rng, count, shape):
    """Returns smooth regions of 5 to 95 % of the image."""
    noise = [
        cv2.GaussianBlur(rng.standard_normal(shape), (0, 0), rng.uniform(1, 12))
        for _ in range(count)
    ]
    return np.stack([each > np.quantile(each, rng.uniform(0.05, 0.95)) for each in noise])


@pytest.mark.parametrize("seed", range(4))
def test_the_farthest_pixel(seed):
    """With all pixels around the farthest taken again and again, and in groups of masks."""
    rng = np.random.default_rng(seed)
    regions = blobs(rng, 3, (117, 90))
    regions[0] = seed % 2
    taken = np.zeros((3, 0, 2), np.int64)
    for _ in range(4):
        expected = [farthest_point(*each) for each in zip(regions, taken, strict=True)]
        xy, squared = farthest.farthest_points(torch.from_numpy(regions), torch.from_numpy(taken))
        assert [tuple(each) for each in xy.tolist()] == [point[:2] for point in expected]
        assert squared.tolist() == [round(point[2] ** 2) for point in expected]
        around = np.stack(np.meshgrid([-1, 0, 1], [-1, 0, 1]), -1).reshape(-1, 2)
        taken = np.concatenate([taken, xy.numpy()[:, None] + around], 1)


def test_masks_are_done_in_groups_that_fit_into_memory(monkeypatch):
    regions = torch.from_numpy(blobs(np.random.default_rng(0), 5, (40, 70)))
    taken = NONE.expand(5, -1, -1)
    together = farthest.farthest_points(regions, taken)
    monkeypatch.setattr(farthest, "MAX_PIXELS", 2 * 40 * 70)
    for found, expected in zip(farthest.farthest_points(regions, taken), together, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (33, 2), (32, 64)])
def test_small_grids_and_regions(shape):
    full = torch.ones(1, *shape, dtype=torch.bool)
    found = farthest.farthest_points(full, NONE)
    assert (*found.xy[0].tolist(), float(found.squared) ** 0.5) == farthest_point(full[0].numpy())
    none = farthest.farthest_points(~full, NONE)
    assert (none.xy.tolist(), none.squared.tolist()) == ([[0, 0]], [0])
    assert farthest.farthest_points(full[:0], NONE[:0]).xy.shape == (0, 2)


def test_clicks_are_those_of_evaluation(make_truth):
    """Misses, false alarms, padding, and masks without an error, until no pixel is left."""
    rng = np.random.default_rng(7)
    truth, guess = blobs(rng, 6, (20, 30)), blobs(rng, 6, (20, 30))
    guess[3], guess[4] = truth[3], ~truth[4]
    truth[5], guess[5] = False, False
    targets: Targets = make_truth(truth)
    targets.valid[:, :, 24:] = False
    targets.valid[3] = False
    targets.valid[3, 5, 5:8] = True
    logits = torch.where(torch.from_numpy(guess), 1.0, -1.0)[:, None]
    schedule, clicked = CenterClicks(clicks=9), torch.zeros(6, 0, 2, dtype=torch.int64)
    prompts, labels = schedule.next(None, targets, None, 0.0), []
    pred_mask = torch.zeros_like(targets.foreground)
    for index in range(6):
        found = farthest.center_clicks(targets.foreground, pred_mask, targets.valid, clicked)
        xy = ((prompts.points_xy_input[:, -2] + 0.5) / 4).long()
        labels.append(prompts.labels[:, -2])
        assert torch.equal(found[:, 2], labels[-1])
        is_click = labels[-1] >= 0
        assert torch.equal(found[is_click, :2], xy[is_click])
        clicked = torch.cat([clicked, found[:, None, :2]], 1)
        prediction = Prediction(logits, logits[:, :, 0, 0], logits[..., :8, :8])
        step = PromptRound(index, prompts, prediction)
        prompts, pred_mask = schedule.next(step, targets, None, 0.0), step.pred_mask
    assert set(torch.stack(labels).flatten().tolist()) == {-1, 0, 1}
