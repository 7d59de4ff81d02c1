"""Every operation on runs equals the same operation on pixels."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigamask.errors import GigamaskError
from gigamask.masks.devices import decode_rle
from gigamask.masks.rle import RLEMasks


@st.composite
def pixel_masks(draw, fewest: int = 0, filled: bool = False) -> np.ndarray:
    """Masks of one small size: noise of any density, blocks, full and empty ones."""
    height, width = draw(st.integers(1, 17)), draw(st.integers(1, 17))
    count = draw(st.integers(fewest, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    masks = random.random((count, height, width)) < random.choice(
        [0, 0.05, 0.5, 0.95, 1], (count, 1, 1)
    )
    for mask in masks[: count // 2]:
        (y0, y1), (x0, x1) = (
            np.sort(random.integers(0, height + 1, 2)),
            np.sort(random.integers(0, width + 1, 2)),
        )
        mask[:] = False
        mask[y0:y1, x0:x1] = True
    if filled:
        masks[:, random.integers(height), random.integers(width)] = True
    return masks


@st.composite
def lines(draw, size: int) -> np.ndarray:
    """What target rows or columns show: skips, repeats, and -1 around them."""
    inner = sorted(draw(st.lists(st.integers(0, size - 1), max_size=25)))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return np.array([-1] * before + inner + [-1] * after or [-1], np.int64)


def same(a: RLEMasks, b: RLEMasks) -> bool:
    return (
        a.size == b.size
        and np.array_equal(a.bounds, b.bounds)
        and np.array_equal(a.offsets, b.offsets)
    )


def read(counts: list, size: tuple[int, int]) -> tuple[RLEMasks | None, str]:
    """The masks, or why they were refused."""
    try:
        return RLEMasks.from_coco(counts, size), ""
    except GigamaskError as fault:
        return None, str(fault)


@given(pixel_masks())
def test_runs_to_pixels_and_back(masks):
    runs = RLEMasks.from_dense(masks)
    assert np.array_equal(runs.to_dense(), masks)
    assert same(RLEMasks.from_dense(runs.to_dense()), runs)
    assert np.array_equal(
        decode_rle(
            torch.from_numpy(runs.bounds), torch.from_numpy(runs.offsets), runs.size
        ).numpy(),
        masks,
    )


@given(pixel_masks())
def test_runs_to_text_and_back(masks):
    runs = RLEMasks.from_dense(masks)
    assert same(RLEMasks.from_coco(runs.to_coco(), runs.size), runs)


@given(pixel_masks())
def test_bounds_increase_within_each_mask(masks):
    runs = RLEMasks.from_dense(masks)
    for part in np.split(runs.bounds, runs.offsets[1:-1]):
        assert (np.diff(part) > 0).all()
    assert ((runs.bounds >= 0) & (runs.bounds < masks[0].size if len(masks) else True)).all()


@given(pixel_masks(), st.data())
def test_resampling_equals_indexing(masks, data):
    rows, columns = data.draw(lines(masks.shape[1])), data.draw(lines(masks.shape[2]))
    flip = data.draw(st.booleans())
    shown = masks[:, rows][:, :, columns] & (rows >= 0)[:, None] & (columns >= 0)
    expected = shown[:, :, ::-1] if flip else shown
    resampled = RLEMasks.from_dense(masks).resample(rows, columns, flip)
    assert np.array_equal(resampled.to_dense(), expected)
    assert same(resampled, RLEMasks.from_dense(expected))


@given(pixel_masks())
def test_areas_and_boxes_equal_those_of_pixels(masks):
    runs = RLEMasks.from_dense(masks)
    assert np.array_equal(runs.areas(), masks.sum((1, 2)))
    for mask, box in zip(masks, runs.boxes(), strict=True):
        y, x = np.nonzero(mask)
        assert box.tolist() == ([x.min(), y.min(), x.max(), y.max()] if len(x) else [0, 0, -1, -1])


@given(pixel_masks(), st.integers(0, 2**32 - 1))
def test_overlaps_equal_those_of_pixels(masks, seed):
    other = np.random.default_rng(seed).permuted(masks, axis=2)[: max(len(masks) - 1, 0)]
    shared = np.einsum("nhw,mhw->nm", masks.astype(int), other.astype(int))
    union = masks.sum((1, 2))[:, None] + other.sum((1, 2)) - shared
    a, b = RLEMasks.from_dense(masks), RLEMasks.from_dense(other)
    assert np.array_equal(a.intersections(b), shared)
    assert np.array_equal(a.iou(b), np.where(union, shared / np.maximum(union, 1), 0))


@given(pixel_masks(filled=True), st.data())
def test_points_are_the_pixels_their_numbers_say(masks, data):
    count = data.draw(st.integers(0, 5))
    uniforms = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).random(
        (len(masks), count)
    )
    points = RLEMasks.from_dense(masks).sample_points(uniforms)
    for mask, u, xy in zip(masks, uniforms, points, strict=True):
        foreground = np.argwhere(mask.T)
        assert np.array_equal(xy, foreground[(u * len(foreground)).astype(int)])


def test_points_are_uniform():
    mask = np.random.default_rng(0).random((1, 12, 15)) < 0.4
    points = RLEMasks.from_dense(mask).sample_points(np.random.default_rng(1).random((1, 100_000)))[
        0
    ]
    counts = np.bincount(points[:, 1] * 15 + points[:, 0], minlength=180)[mask.ravel()]
    expected = 100_000 / mask.sum()
    cells = mask.sum()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - (cells - 1)) < 4 * np.sqrt(2 * (cells - 1))


@given(pixel_masks(fewest=1), st.data())
def test_choosing_and_joining_equal_those_of_pixels(masks, data):
    runs = RLEMasks.from_dense(masks)
    index = np.array(data.draw(st.lists(st.integers(0, len(masks) - 1), max_size=6)), np.int64)
    assert np.array_equal(runs[index].to_dense(), masks[index])
    assert same(
        RLEMasks.concatenate([runs[index], runs]),
        RLEMasks.from_dense(np.concatenate([masks[index], masks])),
    )


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.text(max_size=20),
            st.lists(st.integers(-5, 2**70), max_size=9),
        ),
        max_size=4,
    ),
    st.data(),
)
def test_garbage_is_refused_or_sound(counts, data):
    size = data.draw(
        st.sampled_from([(1, 1), (3, 4), (1, 40), (2**15, 2**15), (2**20, 2**20), (0, 3)])
    )
    runs, refusal = read(counts, size)
    if runs is None:
        assert refusal.startswith(("mask ", "size "))
        assert "\n" not in refusal
        return
    assert len(runs) == len(counts)
    assert same(RLEMasks.from_coco(runs.to_coco(), size), runs)


ALPHABET = st.integers(48, 111)


@given(st.lists(ALPHABET, max_size=30).map(bytes), st.integers(1, 30), st.integers(1, 30))
def test_garbage_in_the_right_letters_is_refused_or_sound(text, height, width):
    runs, refusal = read([text], (height, width))
    if runs is None:
        assert refusal.startswith("mask 0: ")
    else:
        assert same(RLEMasks.from_dense(runs.to_dense()), runs)


@given(pixel_masks(fewest=1), st.data())
def test_one_wrong_letter_never_makes_an_unsound_mask(masks, data):
    texts = RLEMasks.from_dense(masks).to_coco()
    index = data.draw(st.integers(0, len(texts) - 1))
    place = data.draw(st.integers(0, len(texts[index]) - 1))
    texts[index] = (
        texts[index][:place] + data.draw(st.binary(max_size=2)) + texts[index][place + 1 :]
    )
    runs, refusal = read(texts, masks.shape[1:])
    if runs is None:
        assert refusal.startswith(f"mask {index}: ")
    else:
        assert same(RLEMasks.from_dense(runs.to_dense()), runs)
