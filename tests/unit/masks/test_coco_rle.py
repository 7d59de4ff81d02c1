"""Every malformed text is refused, by name, before anything of the claimed size is made."""

import re

import numpy as np
import pytest

from gigamask.masks.coco_rle import PIXEL_LIMIT, read_spans, write_counts
from gigamask.masks.rle import RLEMasks
from tests.errors import error_line

SIZE = (4, 5)


def text(*lengths: int) -> bytes:
    return write_counts(np.array(lengths, np.int64), np.array([0, len(lengths)]))[0]


MALFORMED = {
    "empty": (b"", "mask 1: run lengths sum to 0, the image has 4 x 5 = 20 pixels"),
    "empty list": ([], "mask 1: run lengths sum to 0, the image has 4 x 5 = 20 pixels"),
    "cut short": (text(6, 8), "mask 1: run lengths sum to 14, the image has 4 x 5 = 20 pixels"),
    "cut within a number": (text(6, 8, 6) + b"P", "mask 1: the counts end within a number"),
    "too long": (text(6, 8, 7), "mask 1: run lengths sum to 21, the image has 4 x 5 = 20 pixels"),
    "wrong size": (
        text(6, 800, 6),
        "mask 1: run length 800 (number 1) is too long, the image has 4 x 5 = 20 pixels",
    ),
    "negative": (text(6, -2, 16), "mask 1: run length -2 (number 1) is negative"),
    "negative by difference": (
        text(6, 2, 8, -1, 5),
        "mask 1: run length -1 (number 3) is negative",
    ),
    "negative background": (text(6, 8, -2, 8), "mask 1: run length -2 (number 2) is negative"),
    "longer than 32 bits": (
        text(6, 2**32 + 8, 6),
        "mask 1: run length 4294967304 (number 1) is too long",
    ),
    "negative beyond 32 bits": (
        text(6, 8 - 2**32, 6),
        "mask 1: run length -4294967288 (number 1) is negative",
    ),
    "longer than 32 bits by differences": (
        text(2, 2, 2, *(2**30 * i for i in range(1, 5)), 2),
        "mask 1: run length 1073741824 (number 3) is too long",
    ),
    "bad character": (b"6~6", "mask 1: byte 126 at position 1 of the counts"),
    "first letter beyond": (b"6p6", "mask 1: byte 112 at position 1 of the counts"),
    "space": (b" 686", "mask 1: byte 32 at position 0 of the counts"),
    "not ascii": ("6é6", "mask 1: byte 195 at position 1 of the counts"),
    "lone surrogate": ("\ud800", "mask 1: byte 237 at position 0 of the counts"),
    "endless number": (
        b"P" * 7 + b"0" + text(6, 8, 6),
        "mask 1: a number has 8 characters, at most 7",
    ),
    "huge number": (b"oooooo?" + text(6), "mask 1: run length"),
    "list: negative": ([6, -2, 16], "mask 1: run length -2 (number 1) is negative"),
    "list: short": ([6, 8], "mask 1: run lengths sum to 14"),
    "list: too big for int64": (
        [2**63, 1],
        "mask 1: run lengths must be a string or a list of integers below 2**63",
    ),
    "list: far too big": (
        [2**80],
        "mask 1: run lengths must be a string or a list of integers below 2**63",
    ),
    "list: fractions": ([6.5, 13.5], "mask 1: run lengths must be a string or a list of integers"),
    "list: words": (["6", "14"], "mask 1: run lengths must be a string or a list of integers"),
    "list: ragged": ([[6], [7, 7]], "mask 1: run lengths must be a string or a list of integers"),
    "list: nested": ([[6, 14]], "mask 1: run lengths must be a string or a list of integers"),
    "list: truths": ([True] * 20, "mask 1: run lengths must be a string or a list of integers"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("company", [text(6, 8, 6), [20]], ids=["beside text", "beside a list"])
def test_malformed_counts_are_refused_by_name(name, company):
    counts, message = MALFORMED[name]
    with error_line("^" + re.escape(message)):
        RLEMasks.from_coco([company, counts, company], SIZE)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 5)])
def test_a_grid_without_pixels_is_refused(size):
    with error_line(rf"{size[0]} x {size[1]}"):
        RLEMasks.from_coco([b"0"], size)


def test_a_grid_that_is_too_large_is_refused():
    with error_line(rf"100000 x 100000.*{PIXEL_LIMIT}"):
        RLEMasks.from_coco([[10**10]], (100_000, 100_000))


def test_a_large_grid_costs_only_its_text():
    runs = RLEMasks.from_coco([[2**29, 5, 2**29 - 5]], (2**15, 2**15))
    assert runs.areas().tolist() == [5]
    assert runs.boxes().tolist() == [[2**14, 0, 2**14, 4]]
    assert RLEMasks.from_coco(runs.to_coco(), runs.size).bounds.tolist() == [2**29, 2**29 + 5]


def test_text_bytes_and_lists_may_stand_side_by_side():
    runs = RLEMasks.from_coco([text(6, 8, 6), text(6, 8, 6).decode(), [6, 8, 6]], SIZE)
    assert runs.bounds.tolist() == [6, 14] * 3
    assert runs.offsets.tolist() == [0, 2, 4, 6]
    record = {"size": list(SIZE), "counts": text(6, 8, 6)}  # of COCO's JSON
    assert runs.iou(RLEMasks.from_coco([record["counts"]], record["size"])).all()


def test_runs_without_length_join_their_neighbours():
    runs = RLEMasks.from_coco([[6, 0, 0, 8, 6], [6, 4, 0, 4, 6], [0, 20, 0, 0], [20, 0]], SIZE)
    assert [runs[i : i + 1].bounds.tolist() for i in range(4)] == [[6, 14], [6, 14], [0], []]


def test_numbers_of_every_width_come_back():
    lengths = np.array(
        [0, 1, 2**30 - 2**26, 2**4, 15, 2**9, 2**14 - 1, 2**19, 2**24, 2**25], np.int64
    )
    lengths = np.append(lengths, 2**30 - lengths.sum())
    read = read_spans([write_counts(lengths, np.array([0, 11]))[0]], np.array([[2**15, 2**15]]))
    bounds = np.cumsum(lengths)[:-1].reshape(-1, 2)
    assert np.stack([read.begin, read.end], 1).tolist() == bounds.tolist()
    assert read.offsets.tolist() == [0, 5]


def test_masks_of_several_sizes_are_read_together():
    counts, sizes = [text(6, 8, 6), [3], text(0, 2, 1, 3)], [(4, 5), (1, 3), (3, 2)]
    read = read_spans(counts, np.array(sizes))
    alone = [RLEMasks.from_coco([one], size) for one, size in zip(counts, sizes, strict=True)]
    assert read.areas().tolist() == [masks.areas()[0] for masks in alone] == [8, 0, 5]
    boxes = read.boxes(np.array([4, 1, 3]))
    assert boxes.tolist() == [masks.boxes()[0].tolist() for masks in alone]
    with error_line("mask 1: run lengths sum to 3, the image has 2 x 3 = 6"):
        read_spans(counts, np.array([(4, 5), (2, 3), (3, 2)]))


def test_no_masks_are_no_text():
    assert write_counts(np.zeros(0, np.int64), np.zeros(1, np.int64)) == []
    assert len(RLEMasks.from_coco([], SIZE)) == 0
