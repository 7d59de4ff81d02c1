from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.prompts.boxes import jitter_boxes
from gigamask.prompts.masks import jitter_masks
from tests.errors import error_line


def rectangle(y0, y1, x0, x1, side=32):
    mask = np.zeros((side, side), bool)
    mask[y0:y1, x0:x1] = True
    return mask


def test_unmoved_mask_prompt_is_the_target(make_truth):
    masks = np.stack(
        [
            rectangle(3, 9, 4, 20),
            rectangle(0, 32, 0, 32),
            rectangle(31, 32, 0, 1),
            np.zeros((32, 32), bool),
        ]
    )
    for cell in (4.0, 1024 / 700, 1.0):
        truth = make_truth(masks, cell_xy=(cell, cell))
        logits = jitter_masks(truth, truth.boxes_input, 7.0)
        assert torch.equal(logits, torch.where(truth.masks, 7.0, -7.0))


def test_the_mask_goes_where_its_box_goes(make_truth):
    truth = make_truth(rectangle(8, 16, 10, 14)[None])
    box = torch.tensor(
        [[12 * 4.0, 4 * 4.0, 20 * 4.0 - 1, 20 * 4.0 - 1]]
    )  # two cells to the right and twice as wide, twice as high
    assert torch.equal(jitter_masks(truth, box, 1.0)[0] > 0, torch.tensor(rectangle(4, 20, 12, 20)))
    smaller = torch.tensor([[11 * 4.0, 10 * 4.0, 13 * 4.0 - 1, 14 * 4.0 - 1]])
    assert torch.equal(
        jitter_masks(truth, smaller, 1.0)[0] > 0, torch.tensor(rectangle(10, 14, 11, 13))
    )


def test_a_box_ends_with_the_last_stored_pixel(make_truth):
    """Cells of 4 and stored pixels of 8 input pixels: the box of two cells is that of one pixel."""
    scale_xy = torch.full((1, 2), 8.0)
    truth = replace(make_truth(rectangle(8, 16, 10, 12)[None]), scale_xy=scale_xy)
    truth = replace(truth, boxes_input=torch.tensor([[40.0, 32.0, 40.0, 56.0]]))
    box = torch.tensor([[48.0, 32.0, 56.0, 56.0]])  # a pixel to the right, and one wider
    assert torch.equal(jitter_masks(truth, box, 1.0)[0] > 0, torch.tensor(rectangle(8, 16, 12, 16)))


def test_what_would_come_from_beyond_the_grid_is_outside(make_truth):
    truth = make_truth(rectangle(0, 32, 0, 32)[None])
    inner = torch.tensor([[8 * 4.0, 0.0, 24 * 4.0 - 1, 32 * 4.0 - 1]])
    assert torch.equal(
        jitter_masks(truth, inner, 1.0)[0] > 0, torch.tensor(rectangle(0, 32, 8, 24))
    )


def test_its_box_is_the_noisy_box_to_a_cell(make_truth, make_draws):
    rng = np.random.default_rng(3)
    masks = np.stack([rectangle(y, y + h, x, x + w) for y, x, h, w in rng.integers(2, 15, (60, 4))])
    truth = make_truth(masks, cell_xy=(8.0, 8.0))
    moved = jitter_boxes(truth, make_draws(60), 0.1, 20.0)
    found = make_truth(
        (jitter_masks(truth, moved, 10.0) > 0).numpy(), cell_xy=(8.0, 8.0)
    ).boxes_input
    assert (found - moved).abs().max() <= 4.0 + 1e-3, "half a cell"
    assert (moved - truth.boxes_input).abs().max() > 8


def test_finer_target_is_averaged_to_the_models_grid(make_truth):
    fine = torch.zeros(1, 32, 32, dtype=torch.bool)
    fine[0, 8:16, 8:18] = True
    truth = make_truth(fine, cell_xy=(1.0, 1.0), mask_prompt_size=8)
    logits = jitter_masks(truth, truth.boxes_input, 10.0)[0]
    assert logits.shape == (8, 8)
    wanted = torch.full((8, 8), -10.0)
    wanted[2:4, 2:4], wanted[2:4, 4] = 10.0, 0.0
    assert torch.equal(logits, wanted), "half a cell covered is undecided"
    soft = torch.zeros(1, 8, 8)
    soft[0, 3, 3] = 0.75
    truth = make_truth(soft)
    assert jitter_masks(truth, truth.boxes_input, 10.0)[0, 3, 3] == 5


@pytest.mark.parametrize(
    "shape, mask_prompt_size, named",
    [((20, 32), None, "20 x 32"), ((32, 32), 5, "32 x 32"), ((32, 20), 4, "32 x 20")],
)
def test_a_grid_that_does_not_fit_is_refused(make_truth, shape, mask_prompt_size, named):
    truth = make_truth(np.zeros((1, *shape), bool), mask_prompt_size=mask_prompt_size)
    side = mask_prompt_size or shape[1]
    message = f"{side} x {side}.*{named}"
    with error_line(message):
        jitter_masks(truth, truth.boxes_input, 1.0)
