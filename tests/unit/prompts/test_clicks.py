import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from gigamask.prompts.clicks import (
    _squared_edt_torch,
    cell_to_input,
    input_to_cell,
    next_click,
    sample_fp_fn_clicks,
    squared_edt,
    uniform_click,
)
from gigamask.rng import make_rng
from gigamask.types import Targets

ALMOST_ONE = 1 - 2**-24


def uniforms(*shape, position=0):
    return torch.tensor(make_rng(0, "test clicks", position).random(shape), dtype=torch.float32)


def chi_square_excess(counts, expected):
    """Returns by how many standard deviations Pearson's statistic exceeds its mean."""
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_each_pixel_has_an_equal_part_of_the_unit_square():
    error = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    pixels = [(x, y) for y in range(3) for x in range(4) if error[y, x]]
    middles = []
    for y, row in enumerate(error):
        for k in range(int(row.sum())):
            before = int(error[:y].sum())
            middles.append([(before + k + 0.5) / 6, (k + 0.5) / int(row.sum())])
    found = uniform_click(error.expand(6, 3, 4), torch.tensor(middles))
    assert [tuple(xy) for xy in found.tolist()] == pixels


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5, ALMOST_ONE]),
    st.sampled_from([0.0, ALMOST_ONE]),
)
def test_a_click_lies_in_its_mask_for_any_uniform(seed, height, width, first, second):
    rng = np.random.default_rng(seed)
    error = rng.random((5, height, width)) < rng.random((5, 1, 1))
    error[:, rng.integers(height), rng.integers(width)] = True
    xy = uniform_click(torch.tensor(error), torch.tensor([[first, second]]).expand(5, 2))
    assert error[np.arange(5), xy[:, 1].numpy(), xy[:, 0].numpy()].all()


def test_the_largest_grid_is_reached_to_its_last_pixel():
    full = torch.ones(1, 1024, 1024, dtype=torch.bool)
    assert uniform_click(full, torch.tensor([[ALMOST_ONE, ALMOST_ONE]])).tolist() == [[1023, 1023]]
    assert uniform_click(full, torch.zeros(1, 2)).tolist() == [[0, 0]]


def edge(truth, guess, valid):
    """Returns 500 clicks on one 3 x 5 picture as pixels and labels."""
    masks = [torch.tensor(mask).bool().expand(500, 3, 5) for mask in (guess, truth, valid)]
    xy, label = next_click(masks[0], masks[1], uniforms(500, 2), masks[2])
    return {tuple(p) for p in xy.tolist()}, set(label.tolist())


FULL, EMPTY = np.ones((3, 5)), np.zeros((3, 5))
ONE = EMPTY.copy()
ONE[1, 3] = 1
EVERYWHERE = {(x, y) for x in range(5) for y in range(3)}
LEFT = FULL.copy()
LEFT[:, 3:] = 0
IN_LEFT = {(x, y) for x, y in EVERYWHERE if x < 3}


@pytest.mark.parametrize(
    "truth, guess, valid, places, label",
    [
        # Without an error the click confirms the mask, or the background where there is none.
        (ONE, ONE, FULL, {(3, 1)}, 1),
        (FULL, FULL, FULL, EVERYWHERE, 1),
        (EMPTY, EMPTY, FULL, EVERYWHERE, 0),
        (EMPTY, EMPTY, LEFT, IN_LEFT, 0),
        (EMPTY, FULL, LEFT, IN_LEFT, 0),
        (ONE, EMPTY, FULL, {(3, 1)}, 1),
        (FULL, EMPTY, FULL, EVERYWHERE, 1),
        (ONE, FULL, FULL, EVERYWHERE - {(3, 1)}, 0),
        (ONE, EMPTY, LEFT, IN_LEFT, 0),  # a mask in the padding alone counts as empty
    ],
)
def test_a_click_corrects_or_confirms(truth, guess, valid, places, label):
    assert edge(truth, guess, valid) == (places, {label})


def test_two_clicks_are_uniform_in_false_negatives_and_false_positives():
    number = 50_000
    truth, guess, valid = (
        torch.zeros(6, 6, dtype=torch.bool),
        torch.zeros(6, 6, dtype=torch.bool),
        torch.ones(6, 6, dtype=torch.bool),
    )
    truth[0:4, 0:4] = guess[1:6, 2:6] = True
    valid[5] = False
    every = [mask.expand(number, 6, 6) for mask in (guess, truth, valid)]
    xy, labels = sample_fp_fn_clicks(
        every[0], every[1], uniforms(number, 2, 2, position=4), every[2]
    )
    assert (labels == torch.tensor([1, 0])).all()
    for side, region in enumerate((truth & ~guess & valid, guess & ~truth & valid)):
        counts = np.zeros((6, 6))
        np.add.at(counts, (xy[:, side, 1], xy[:, side, 0]), 1)
        assert counts[~region.numpy()].sum() == 0
        assert abs(chi_square_excess(counts[region.numpy()], number / int(region.sum()))) < 5
    both = torch.corrcoef(torch.stack([*xy[:, 0].T, *xy[:, 1].T]).double())[:2, 2:]
    assert both.abs().max() < 5 / number**0.5, "the two places know nothing of each other"


def sides(truth, guess, valid=FULL):
    """Returns 200 pairs of clicks on one 3 x 5 picture as pixels and labels of each side; None for
    no point."""
    masks = [torch.tensor(mask).bool().expand(200, 3, 5) for mask in (guess, truth, valid)]
    xy, labels = sample_fp_fn_clicks(masks[0], masks[1], uniforms(200, 2, 2), masks[2])
    found = []
    for side in (0, 1):
        [label] = set(labels[:, side].tolist())
        found.append(None if label < 0 else ({tuple(p) for p in xy[:, side].tolist()}, label))
    return found


def test_a_side_without_an_error_has_no_point_and_two_such_confirm_once():
    only = ({(3, 1)}, 1)
    assert sides(ONE, EMPTY) == [only, None], "a miss and no false alarm"
    assert sides(ONE, FULL) == [None, (EVERYWHERE - {(3, 1)}, 0)], "no miss, but false alarms"
    assert sides(ONE, ONE) == [only, None], "confirmed"
    assert sides(FULL, FULL) == [(EVERYWHERE, 1), None]
    assert sides(FULL, EMPTY) == [(EVERYWHERE, 1), None]
    assert sides(EMPTY, EMPTY) == [(EVERYWHERE, 0), None]
    assert sides(EMPTY, FULL) == [None, (EVERYWHERE, 0)]
    other = EMPTY.copy()
    other[0, 0] = 1
    assert sides(ONE, other) == [only, ({(0, 0)}, 0)], "both of one pixel"


def test_two_clicks_never_lie_in_padding():
    assert sides(ONE, EMPTY, LEFT) == [(IN_LEFT, 0), None], (
        "the truth is in the padding: nothing is wrong"
    )
    assert sides(EMPTY, FULL, LEFT) == [None, (IN_LEFT, 0)]
    assert sides(FULL, ONE, LEFT) == [(IN_LEFT, 1), None]
    assert sides(FULL, ONE, EMPTY) == [None, None]


def grid(cell_xy, *scales_xy):
    masks = torch.zeros(len(scales_xy), 2, 2, dtype=torch.bool)
    scales, far = torch.tensor(scales_xy), torch.full((len(masks), 2), 1e6)
    return Targets(masks, masks, torch.zeros(len(masks), 4), cell_xy, scales, extent_xy=far)


@pytest.mark.slow
def test_cells_have_their_centres_in_the_input_and_back():
    square = grid((4.0, 4.0), (1.0, 1.0))
    assert cell_to_input(torch.tensor([[[0, 0], [255, 3]]]), square).tolist() == [
        [[1.5, 1.5], [1021.5, 13.5]]
    ]
    assert cell_to_input(torch.tensor([[7, 2]]), grid((1.0, 1.0), (1.0, 1.0))).tolist() == [
        [7.0, 2.0]
    ]
    assert cell_to_input(torch.tensor([[1, 1]]), grid((2.0, 6.0), (1.0, 1.0))).tolist() == [
        [2.5, 8.5]
    ], "width first"
    cells = torch.stack(
        torch.meshgrid(torch.arange(10, 700), torch.arange(10, 500), indexing="ij"), -1
    ).reshape(1, -1, 2)
    for cell_xy in [(4.0, 4.0), (1024 / 700, 1024 / 700), (1.0, 0.37)]:
        for scale in (0.3, 1.0, 5.0):
            targets = grid(cell_xy, (scale, scale))
            assert torch.equal(input_to_cell(cell_to_input(cells, targets), targets), cells)


def test_points_stay_on_the_pixels_of_the_image():
    targets = replace(grid((4.0, 4.0), (8.0, 1.0)), extent_xy=torch.tensor([[9.0, 9.0]]))
    cells = torch.tensor([[[0, 0], [2, 2]]])
    assert cell_to_input(cells, targets).tolist() == [[[0.0, 1.5], [1.0, 8.0]]]


def test_cells_of_the_stored_size_have_the_coordinates_of_their_pixels():
    """x * scale, as in SAM's `apply_coords`; each mask has the scale of its image."""
    cells = torch.tensor([[[9, 4]], [[9, 4]]])
    assert (
        cell_to_input(cells, grid((0.5, 0.25), (0.5, 0.25), (0.5, 0.25))).tolist()
        == [[[4.5, 1.0]]] * 2
    )
    assert cell_to_input(cells, grid((4.0, 4.0), (4.0, 4.0), (2.0, 8.0))).tolist() == [
        [[36.0, 16.0]],
        [[37.0, 14.0]],
    ]


@pytest.mark.parametrize("height, width", [(1, 1), (1, 9), (7, 1), (64, 64), (129, 250)])
def test_opencv_and_the_passes_of_a_gpu_find_the_exact_squared_distances(height, width):
    rng = make_rng(5, "opencv", height, width)
    noise = rng.random((5, height, width), np.float32)
    region = np.zeros((8, height, width), bool)
    region[:4] = noise[:4] < np.array([0.3, 0.9, 0.999, 0.99999])[:, None, None]
    region[4] = cv2.GaussianBlur(noise[4], (0, 0), max(height, width) / 20) > 0.5  # blobs
    region[5], region[6, height // 2, width // 3] = True, True  # full, one pixel, and empty
    masks = torch.from_numpy(region)
    found = squared_edt(masks)
    assert (found.dtype, found.shape) == (torch.float32, masks.shape)
    assert torch.equal(found, _squared_edt_torch(masks))
    distances = [ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1] for mask in region]
    assert np.array_equal(found, np.rint(np.square(distances)))
    transposed = masks.transpose(1, 2)
    assert torch.equal(squared_edt(transposed), found.transpose(1, 2)), "in any memory layout"
    assert squared_edt(masks[:0]).shape == (0, height, width)


@pytest.mark.slow
def test_a_compiler_knows_the_shape_and_dtype_of_the_distances():
    region = torch.ones(2, 5, 7, dtype=torch.bool)
    torch.library.opcheck(torch.ops.gigamask.squared_edt, (region,), test_utils="test_faketensor")


@pytest.mark.slow
def test_central_clicks_are_those_of_evaluation_and_the_others_stay_uniform():
    truth = torch.zeros(4000, 9, 9, dtype=torch.bool)
    truth[:, 1:8, 1:6] = True
    uniforms = torch.tensor(make_rng(4, "central").random((4000, 2)), dtype=torch.float32)
    xy, label = next_click(torch.zeros_like(truth), truth, uniforms, torch.ones_like(truth), 0.4)
    middle = (xy[:, 0] == 3) & (xy[:, 1] >= 3) & (xy[:, 1] <= 5)
    central = uniforms[:, 0] < 0.4
    assert middle[central].all()
    assert torch.bincount(xy[central, 1])[3:].float().std() < 60, "ties are equally likely"
    assert abs(float(middle[~central].float().mean()) - 3 / 35) < 0.03
    assert (label == 1).all()
    wrong = truth.clone()
    wrong[:, 1:8, 1:5] = False
    wrong[:, 0] = True
    xy, label = next_click(wrong, truth, uniforms, torch.ones_like(truth), 1.0)
    assert (label == 1).all(), "the miss is two cells deep, the false alarm one"
    assert ((xy[:, 0] == 2) | (xy[:, 0] == 3)).all()
    xy, label = next_click(truth, wrong, uniforms, torch.ones_like(truth), 1.0)
    assert (label == 0).all(), "and the other way round"
