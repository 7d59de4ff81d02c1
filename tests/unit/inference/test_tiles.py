"""Tiles: what covers an image, which masks are one object, automatic masks joined over borders."""

import tracemalloc
from itertools import pairwise

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.tiles import TileGrid, match_masks
from gigamask.masks.components import paste
from gigamask.masks.rle import RLEMasks, union
from gigamask.rng import make_rng
from tests.errors import error_line
from tests.tiers import long_after

GRIDS = st.builds(
    TileGrid, st.tuples(st.integers(1, 150), st.integers(1, 150)), st.just(40), st.integers(0, 20)
)


@given(GRIDS)
def test_tiles_cover_the_image_and_overlap_by_the_halo(grid):
    seen = np.zeros(grid.size, int)
    for x0, y0, x1, y1 in grid.boxes:
        assert (y1 - y0, x1 - x0) == tuple(min(40, length) for length in grid.size)
        seen[y0:y1, x0:x1] += 1
    assert seen.min() == 1 or grid.halo
    assert seen.min() >= 1
    for length, lines in zip(grid.size, grid.lines, strict=True):
        assert lines[0][0] == 0
        assert lines[-1][1] == length
        assert len(lines) == max(-(-(length - grid.halo) // (40 - grid.halo)), 1)
        overlaps = [a[1] - b[0] for a, b in pairwise(lines)]
        assert all(overlap >= grid.halo for overlap in overlaps)
    for first, second, axis in grid.neighbors():
        (a, b), other = (grid.boxes[first], grid.boxes[second]), 1 - axis
        assert (a[other], a[other + 2]) == (b[other], b[other + 2])
        assert a[axis] < b[axis] <= a[axis + 2]
    assert len(list(grid.neighbors())) == sum(
        (len(lines) - 1) * len(others) for lines, others in (grid.lines, grid.lines[::-1])
    )


def cut_by_tiles(masks, grid):
    """What a perfect model finds in each tile: the visible parts of all masks."""
    parts, tile_index = [], []
    for index, tile in enumerate(grid.boxes):
        x0, y0, x1, y1 = tile
        part = masks.resample(np.arange(y0, y1), np.arange(x0, x1))
        part = part[np.flatnonzero(part.areas())]
        parts.append(paste(part, x0, y0, grid.size))
        tile_index += [index] * len(part)
    return RLEMasks.concatenate(parts), np.array(tile_index, np.int64)


def united(masks, groups):
    kept = np.flatnonzero(groups >= 0)
    return union(masks[kept], groups[kept], int(groups.max(initial=-1)) + 1)


def joined(masks, grid, tolerance=2.0):
    parts, tile_index = cut_by_tiles(masks, grid)
    scores = np.linspace(1, 0, len(parts)).astype(np.float32)
    return united(parts, match_masks(parts, scores, tile_index, grid, tolerance))


@pytest.mark.long
@pytest.mark.slow
@settings(deadline=None)
@given(GRIDS, st.integers(0, 2**31), st.floats(-0.3, 0.3))
def test_objects_that_tiles_cut_are_joined_exactly(grid, seed, level):
    """Disjoint objects of any connected shape, through any number of tiles."""
    noise = make_rng(seed, "blobs").standard_normal(grid.size).astype(np.float32)
    smooth = cv2.GaussianBlur(noise, (0, 0), 4)
    count, labels = cv2.connectedComponents(
        (smooth > level * smooth.std()).astype(np.uint8), connectivity=4
    )
    truth = RLEMasks.from_dense(
        np.array([labels == index for index in range(1, count)], bool).reshape(-1, *grid.size)
    )
    if grid.halo:
        assert sorted(joined(truth, grid).to_coco()) == sorted(truth.to_coco())


@pytest.mark.parametrize("halo", [0, 6, 20])
def test_an_object_across_four_tiles_is_one_mask(halo):
    """And so is one that goes through all tiles of a row; without a halo their sides meet."""
    dense = np.zeros((4, 100, 130), bool)
    dense[0, 30:60, 35:60] = True
    dense[1, 70:80] = True
    dense[2, 5:10, 5:10] = True
    dense[3, 39:41, 3:20] = True
    found = joined(RLEMasks.from_dense(dense), TileGrid((100, 130), 40, halo))
    assert sorted(found.to_coco()) == sorted(RLEMasks.from_dense(dense).to_coco())


def test_a_whole_mask_is_used_alone_and_remains_of_others_are_not():
    """The left tile sees all of an object, the right one a rough part of it and a false one."""
    grid = TileGrid((40, 70), 40, 10)
    dense = np.zeros((4, 40, 70), bool)
    dense[0, 10:20, 20:37] = True
    dense[1, 9:20, 30:38] = True  # the same, cut by the right tile
    dense[2, 25:35, 30:36] = True  # cut, and all of it visible to the left tile
    dense[3, 25:35, 30:60] = True  # cut, but the left tile does not see all of it
    masks = RLEMasks.from_dense(dense)
    scores = np.array([0.5, 0.9, 0.9, 0.9], np.float32)
    groups = match_masks(masks, scores, np.array([0, 1, 1, 1]), grid, 1.0)
    assert groups.tolist() == [0, -1, -1, 1]


def test_at_most_one_mask_of_a_tile_is_joined():
    """A window and its house reach the border: each has its own counterpart."""
    grid = TileGrid((40, 70), 40, 10)
    dense = np.zeros((5, 40, 70), bool)
    dense[0, 5:35, 10:40], dense[1, 10:30, 20:40] = True, True
    dense[2, 5:35, 30:50], dense[3, 10:30, 30:45], dense[4, 8:35, 30:48] = True, True, True
    masks, tiles = RLEMasks.from_dense(dense), np.array([0, 0, 1, 1, 1])
    groups = match_masks(masks, np.ones(5, np.float32), tiles, grid, 1.0)
    assert groups.tolist() == [0, 1, 0, 1, -1]
    assert np.array_equal(
        united(masks, groups).to_dense(), np.stack([dense[0] | dense[2], dense[1] | dense[3]])
    )


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 3))
def test_unions_are_those_of_dense_masks(seed, count, groups):
    random = make_rng(seed, "union")
    dense = random.random((count, 5, 4)) < random.random()
    owner = np.concatenate([random.integers(-1, groups, count), np.arange(groups)])
    dense = np.concatenate([dense, np.zeros((groups, 5, 4), bool)])
    expected = [dense[owner == group].any(0) for group in range(groups)]
    found = united(RLEMasks.from_dense(dense), owner)
    assert found.to_coco() == RLEMasks.from_dense(np.array(expected)).to_coco()


@pytest.mark.slow
def test_memory_grows_with_outlines_not_with_pixels():
    """Masks of 100 megapixels, of which each would take 100 MB if it were dense."""
    grid = TileGrid((10_000, 10_000), 4096, 512)
    part = np.zeros((2, 4096, 4096), bool)
    part[0, 200:300, 3900:], part[1, 400:600, :300] = True, True
    part = RLEMasks.from_dense(part)
    tracemalloc.start()
    masks = RLEMasks.concatenate([paste(part, *tile[:2], grid.size) for tile in grid.boxes])
    tile_index = np.repeat(np.arange(len(grid.boxes)), 2)
    groups = match_masks(masks, np.ones(len(masks), np.float32), tile_index, grid, 8.0)
    assert len(united(masks, groups)) == groups.max() + 1 > 5
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


def rectangles(size, boxes):
    """An image of rectangles x0 y0 x1 y1 in colors of their own on black, and their masks."""
    pixels, dense = np.zeros((*size, 3), np.uint8), np.zeros((len(boxes), *size), bool)
    for index, (x0, y0, x1, y1) in enumerate(boxes):
        pixels[y0:y1, x0:x1] = 250 * np.array([index + 1 & bit > 0 for bit in (1, 2, 4)])
        dense[index, y0:y1, x0:x1] = True
    return pixels, RLEMasks.from_dense(dense)


def settings_of(**changed):
    return {"pred_iou_thresh": 0.5, "stability_score_thresh": 0.0, "points_per_side": 16} | changed


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("halo", long_after(1, [8, 0, 32]))
def test_masks_by_tiles_are_those_of_the_image(by_color, halo, monkeypatch):
    """Small objects, one across four tiles and more, one within a halo, one along the side."""
    boxes = [(4, 4, 20, 24), (40, 30, 90, 90), (60, 100, 76, 116), (100, 0, 116, 128)]
    image, truth = rectangles((128, 160), [*boxes, (120, 60, 158, 76)])
    whole = SamAutomaticMaskGenerator(by_color, **settings_of()).generate_proposals(image)
    assert truth.iou(whole.masks).max(1).min() > 0.7
    embedded, fractions = [], []
    generator = SamAutomaticMaskGenerator(by_color, **settings_of(tile=64, halo=halo))
    predictor = generator.predictor
    set_image = predictor.set_image
    monkeypatch.setattr(
        predictor, "set_image", lambda crop: (embedded.append(crop.shape), set_image(crop))
    )
    found = generator.generate_proposals(image, fractions.append)
    assert len(found) == len(truth)
    assert truth.iou(found.masks).max(1).min() > 0.9
    assert set(embedded) == {(64, 64, 3)}
    assert fractions == [index / len(fractions) for index in range(len(fractions))]
    assert len(fractions) % len(embedded) == 0
    four = found.crops[truth.iou(found.masks)[1].argmax()]
    assert (four[2:] - four[:2]).min() > 64
    assert (found.boxes == found.masks.boxes()).all()
    records = generator.generate(image)
    assert records[0]["area"] == found.masks.areas()[0]


@pytest.mark.slow
def test_an_image_that_is_no_larger_than_a_tile_is_not_cut(by_color):
    image, truth = rectangles((40, 64), [(4, 4, 20, 30), (30, 10, 64, 40)])
    tiled = SamAutomaticMaskGenerator(by_color, **settings_of(tile=64)).generate_proposals(image)
    whole = SamAutomaticMaskGenerator(by_color, **settings_of()).generate_proposals(image)
    assert tiled.masks.to_coco() == whole.masks.to_coco()
    assert truth.iou(whole.masks).max(1).min() > 0.9
    blocks = np.random.default_rng(0).integers(0, 2, (10, 16, 1)) * [255, 255, 255]
    noisy = np.kron(blocks, np.ones((4, 4, 1))).astype(np.uint8)
    clean = {"min_mask_region_area": 30, "box_nms_thresh": 0.3, "crop_nms_thresh": 0.9}
    tiled, whole = (
        SamAutomaticMaskGenerator(by_color, **settings_of(**clean, tile=tile))
        for tile in (64, None)
    )
    found, of = tiled.generate_proposals(noisy), whole.generate_proposals(noisy)
    assert found.masks.to_coco() == of.masks.to_coco()


@pytest.mark.slow
def test_tiles_in_which_nothing_is_found_and_small_regions(by_color):
    image, truth = rectangles((128, 160), [(2, 2, 12, 12)])
    image[6:8, 6:8] = 0
    generator = SamAutomaticMaskGenerator(by_color, **settings_of(tile=64, min_mask_region_area=9))
    found = generator.generate_proposals(image)
    assert found.masks.to_coco() == truth.to_coco()
    assert len(generator.generate_proposals(np.zeros_like(image))) == 0


@pytest.mark.parametrize(
    "values, named",
    [
        ({"tile": 16}, r"tile.*at least 32.*16"),
        ({"tile": 64, "halo": 33}, r"halo of tile 64 .*between 0 and 32.*33"),
        ({"tile": 64, "halo": 100}, r"halo.*tile 64.*100"),
        ({"tile": 64, "halo": -1}, r"halo.*-1"),
        ({"halo": 8}, r"halo 8"),
        ({"tile": 64, "crop_n_layers": 1}, r"crop_n_layers 1.*tile 64"),
    ],
)
def test_tiles_that_cannot_be_are_one_line(values, named):
    with error_line(named):
        AutomaticMaskConfig(**values)
