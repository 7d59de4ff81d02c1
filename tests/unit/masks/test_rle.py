"""Masks as a value: choosing, joining, and what is refused."""

import numpy as np
import pytest
import torch

from gigamask.masks import rle as runs_module
from gigamask.masks.boundary import farthest_point
from gigamask.masks.devices import encode_boxes
from gigamask.masks.rle import RLEMasks, read_masks, write_masks
from tests.errors import error_line


@pytest.fixture
def masks() -> np.ndarray:
    masks = np.zeros((4, 6, 5), bool)
    masks[0, 1:4, 2:5] = True
    masks[2] = True
    masks[3, 5, 1] = masks[3, 0, 2] = True
    return masks


def test_positions_go_down_the_columns(masks):
    runs = RLEMasks.from_dense(masks)
    assert runs.bounds.tolist() == [13, 16, 19, 22, 25, 28, 0, 11, 13]
    assert runs.offsets.tolist() == [0, 6, 6, 7, 9]
    assert len(runs) == 4


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_what_is_not_0_is_foreground(masks, dtype):
    values = masks * np.arange(1, 31).reshape(6, 5).astype(dtype)
    assert RLEMasks.from_dense(values).to_coco() == RLEMasks.from_dense(masks).to_coco()
    assert farthest_point(values[0]) == farthest_point(masks[0])


@pytest.mark.parametrize(
    "chosen",
    [
        np.array([3, 0, 0, 2]),
        np.array([True, False, False, True]),
        slice(1, 3),
        slice(None, None, -1),
        np.array([-1]),
        np.zeros(0, int),
    ],
)
def test_masks_are_chosen_as_numpy_chooses(masks, chosen):
    assert np.array_equal(RLEMasks.from_dense(masks)[chosen].to_dense(), masks[chosen])


def test_overlaps_in_small_blocks_are_the_same(masks, monkeypatch):
    runs = RLEMasks.from_dense(np.random.default_rng(0).random((9, 12, 13)) < 0.5)
    whole = runs.intersections(runs)
    monkeypatch.setattr(runs_module, "PAIR_BLOCK", 50)
    assert np.array_equal(runs.intersections(runs), whole)
    assert runs.intersections(runs[:0]).shape == (9, 0)


def test_masks_of_two_sizes_have_no_overlap(masks):
    with pytest.raises(ValueError, match=r"\(6, 5\).*\(5, 5\)"):
        RLEMasks.from_dense(masks).iou(RLEMasks.from_dense(masks[:, :5]))


def test_masks_of_two_sizes_are_read_and_written_at_once(masks):
    parts = [RLEMasks.from_dense(each) for each in (masks, masks[:0], masks[:, :5])]
    counts = [part.to_coco() for part in parts]
    assert write_masks(parts) == [*counts[0], *counts[2]]
    for part, again in zip(parts, read_masks(counts, [p.size for p in parts]), strict=True):
        assert np.array_equal(part.to_dense(), again.to_dense())


def test_an_empty_mask_has_no_points(masks):
    with error_line("mask 1"):
        RLEMasks.from_dense(masks).sample_points(np.zeros((4, 1)))


def test_a_number_rounded_up_to_one_stays_in_its_mask(masks):
    assert RLEMasks.from_dense(masks[[0, 3]]).sample_points(np.ones((2, 1))).tolist() == [
        [[4, 3]],
        [[2, 0]],
    ]


def test_masks_of_two_sizes_and_no_masks_are_not_joined(masks):
    runs = RLEMasks.from_dense(masks)
    with pytest.raises(ValueError, match=r"\(5, 5\).*\(6, 5\)"):
        RLEMasks.concatenate([runs, RLEMasks.from_dense(masks[:, :5])])
    with pytest.raises(ValueError, match=r"got \[\]"):
        RLEMasks.concatenate([])


@pytest.mark.parametrize("rows", [[2, 1], [0, 6], [0, -1, 1], [-2, -1, 0, -1, 3]])
def test_rows_that_fall_or_leave_the_grid_are_refused(masks, rows):
    with pytest.raises(ValueError, match=r"rows.*6"):
        RLEMasks.from_dense(masks).resample(np.array(rows), np.arange(5))
    with pytest.raises(ValueError, match=r"columns.*5"):
        RLEMasks.from_dense(masks).resample(np.arange(6), np.array([4, 5]))


def test_a_target_that_is_too_large_is_refused(masks):
    with error_line(r"32769 x 32768.*1073741824"):
        RLEMasks.from_dense(masks).resample(np.zeros(32769, np.int64), np.zeros(32768, np.int64))


def test_masks_in_boxes_are_encoded_as_those_of_the_whole_image(masks):
    whole = [(torch.from_numpy(mask), (0, 0)) for mask in masks]
    tight = [
        (torch.from_numpy(masks[0, 1:4, 2:5]), (1, 2)),
        (torch.zeros(0, 0, dtype=torch.bool), (4, 3)),
        (torch.from_numpy(masks[2]), (0, 0)),
        (torch.from_numpy(masks[3, :, 1:3]), (0, 1)),
    ]
    stacked = [
        (torch.from_numpy(masks[:3]), np.zeros((3, 2), int)),
        (torch.from_numpy(masks[3:, :, 1:]), np.array([[0, 1]])),
    ]
    runs = RLEMasks.from_dense(masks)
    alone = [[(mask[None], np.array([at])) for mask, at in boxes] for boxes in (whole, tight)]
    for boxes in (*alone, stacked):
        found = encode_boxes(boxes, (6, 5))
        assert found.bounds.tolist() == runs.bounds.tolist()
        assert found.offsets.tolist() == runs.offsets.tolist()
    assert len(encode_boxes([], (6, 5))) == 0
