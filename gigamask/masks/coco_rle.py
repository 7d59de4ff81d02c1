"""COCO's run-length format, read and written for many masks at once.

The format is that of `rleFrString` and `rleToString` in pycocotools' maskApi.c.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
from jaxtyping import Bool, Int32, Int64, UInt8

from gigamask.errors import GigamaskError
from gigamask.masks.resample import Spans, offsets_of, repeat_index

PIXEL_LIMIT = 2**30
"""Maximum pixels of a mask, so that positions fit int32 with a bit to spare."""

DIGIT_LIMIT = 7
"""Maximum characters of a number: each has five bits, and the difference of two run lengths of at
most `PIXEL_LIMIT` needs 31."""

FIX = "remove this mask or encode it again"


def check_size(size: tuple[int, int]) -> int:
    """Return the number of pixels of a mask of size (H, W), or raise `GigamaskError`."""
    height, width = size
    if height < 1 or width < 1:
        raise GigamaskError(
            f"size {height} x {width}: a mask needs at least one pixel; remove the image"
        )
    if height * width > PIXEL_LIMIT:
        raise GigamaskError(
            f"size {height} x {width}: masks may have at most {PIXEL_LIMIT} pixels; "
            "remove the image or resize it"
        )
    return height * width


def read_spans(counts: Sequence[bytes | str | Sequence], sizes: Int64[np.ndarray, "n 2"]) -> Spans:
    """Decode and validate the counts of masks, which may differ in size.

    Memory is limited by the length of the counts, not by the size that they claim.

    Args:
        counts: Counts of each mask, compressed strings or lists of integers.
        sizes: Size of each mask, (H, W), as `check_size` allows it.

    Returns:
        The runs of foreground; those of one mask may touch.

    Raises:
        GigamaskError: Counts are not valid, or do not sum to H * W; the message has the index of
            the mask.
    """
    if not len(counts):
        return Spans(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64))
    texts = [item if isinstance(item, str) else _as_text(i, item) for i, item in enumerate(counts)]
    pixels = sizes[:, 0] * sizes[:, 1]
    runs, starts = _decode(texts, int(pixels.max())) or _refuse(counts, sizes)
    lengths = runs[:, 1].copy()
    # One running sum serves all masks: that of a mask begins where that of the one before it ends.
    steps = np.add(runs[:, 0], lengths, dtype=np.int64)
    steps[starts[1:-1]] -= pixels[:-1]
    ends = np.cumsum(steps)
    if (ends[starts[1:] - 1] != pixels).any():
        _refuse(counts, sizes)
    filled = np.flatnonzero(lengths > 0)
    end = ends[filled]
    return Spans(end - lengths[filled], end, np.searchsorted(filled, starts))


def _as_text(index: int, item: bytes | Sequence) -> str:
    """Return the counts of one mask as text; a list of integers is compressed."""
    if isinstance(item, bytes):
        return item.decode("latin-1")
    try:
        lengths = np.asarray(item) if len(item) else np.zeros(0, np.int64)
    except (TypeError, ValueError):
        lengths = np.zeros((), object)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or int(lengths.max(initial=0)) >= 2**63:
        raise GigamaskError(
            f"mask {index}: run lengths must be a string or a list of integers below 2**63; {FIX}"
        )
    # Lengths that are refused later need not be told apart.
    lengths = np.clip(lengths.astype(np.int64), -1, PIXEL_LIMIT + 1)
    return write_counts(lengths, np.array([0, len(lengths)]))[0].decode()


def _decode(
    texts: Sequence[str], longest: int
) -> tuple[Int32[np.ndarray, "r 2"], Int64[np.ndarray, "n1"]] | None:
    """Return the lengths of the runs of compressed counts, in pairs.

    A mask whose number of runs is odd has a last foreground of length 0.

    Args:
        texts: Counts of each mask.
        longest: Length of the longest valid run.

    Returns:
        The lengths of the runs of background, and of foreground after each; and the first pair of
        each mask, followed by the end of the last. None: a character, a number or a run is not
        valid.
    """
    text = "0".join([*texts, ""])  # a zero after each mask can be its last foreground
    digits = np.frombuffer(text.encode("ascii", "replace"), np.uint8) - np.uint8(48)
    borders = offsets_of(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
    last, zeros = digits < 32, borders[1:] - 1
    if not (text.isascii() and all(texts) and digits.max() < 64 and last[zeros - 1].all()):
        return None
    is_even = np.add.reduceat(last.view(np.uint8), borders[:-1], dtype=np.uint8) & 1 == 1
    last[zeros[is_even]] = False
    ends = np.flatnonzero(last)
    numbers = _read_numbers(digits, last, ends)
    if numbers is None:
        return None
    starts = np.searchsorted(ends, borders) >> 1
    # From the fourth number of a mask on, each is relative to the one two before it. One sum of
    # int64 (little-endian) adds both columns, as long as no run is negative in the first of them.
    pairs, packed = numbers.reshape(-1, 2), numbers.view(np.int64)
    pairs[:, 1] += pairs[:, 0] >> 31
    heads = starts[:-1][np.diff(starts) > 1]
    packed[heads + 1] -= pairs[heads, 0]  # no background is relative to the first
    packed[starts[1:-1]] -= np.add.reduceat(packed, starts[:-1])[:-1]
    runs = np.cumsum(packed).view(np.int32).reshape(-1, 2)
    if runs.view(np.uint32).max() > longest:
        return None
    runs[starts[1:][~is_even] - 1, 1] = 0
    return runs, starts


def _read_numbers(
    digits: UInt8[np.ndarray, "t"], last: Bool[np.ndarray, "t"], ends: Int64[np.ndarray, "k"]
) -> Int32[np.ndarray, "k"] | None:
    """Return the numbers whose last characters are at `ends`; None if one is too long.

    The last character has the highest five bits, of which the highest is the sign.
    """
    # Most numbers have at most three characters, so that these are decoded at every character:
    # arithmetic of 8 and 16 bits costs less than to look up some of them.
    more = digits >> 5
    low, longer = (digits & 31) * more, np.ones_like(digits)
    numbers = ((digits ^ 16) - np.uint8(16)).view(np.int8).astype(np.int16)
    for size in (1, 2, 3):
        longer = longer[1:] & more[:-size]
        if size < 3:
            numbers[size:] *= longer * np.uint8(31) + np.uint8(1)
            numbers[size:] += low[:-size] * longer
    values = numbers.take(ends).astype(np.int32)
    at = np.flatnonzero(longer.view(bool) & last[3:]) + 3
    index, value = np.searchsorted(ends, at), numbers[at].astype(np.int64)
    for size in range(3, DIGIT_LIMIT + 1):
        is_longer = more[at - size] > 0
        at, index, value = at[is_longer], index[is_longer], value[is_longer]
        value = (value << 5) | low[at - size]
        if (size == DIGIT_LIMIT and at.size) or np.abs(value).max(initial=0) > PIXEL_LIMIT:
            return None
        values[index] = value
    return values


def _refuse(counts: Sequence[bytes | str | Sequence], sizes: Int64[np.ndarray, "n 2"]) -> NoReturn:
    """Raise `GigamaskError` for the first mask whose counts are not valid."""
    problems = (_problem(item, *size) for item, size in zip(counts, sizes.tolist(), strict=True))
    mask, problem = next(each for each in enumerate(problems) if each[1])
    raise GigamaskError(f"mask {mask}: {problem}; {FIX}")


def _problem(item: bytes | str | Sequence, height: int, width: int) -> str:
    """Return what is wrong with the counts of one mask, "" if nothing is."""
    if isinstance(item, str | bytes):
        raw = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item
        if wrong := re.search(rb"[^0-o]", raw):
            where = f"byte {wrong[0][0]} at position {wrong.start()}"
            return f"{where} of the counts is not in 48 to 111"
        if raw[-1:] > b"O":
            return "the counts end within a number"
        digits = np.frombuffer(raw, np.uint8) - np.uint8(48)
        ends = np.flatnonzero(digits < 32)
        sizes = np.diff(ends, prepend=-1)
        if (size := sizes.max(initial=0)) > DIGIT_LIMIT:
            return f"a number has {size} characters, at most {DIGIT_LIMIT} are allowed"
        shifted = (digits & 31) << 5 * repeat_index(sizes)[1]
        sign = (digits[ends] & 16) << 5 * sizes - 4
        runs = np.add.reduceat(shifted, ends + 1 - sizes) - sign
        for side in (1, 2):
            runs[side::2] = np.cumsum(runs[side::2])
    else:
        runs = np.array(item, np.int64)
    pixels = height * width
    grid = f"the image has {height} x {width} = {pixels} pixels"
    for number in np.flatnonzero((runs < 0) | (runs > pixels))[:1]:
        problem = "is negative" if runs[number] < 0 else f"is too long, {grid}"
        return f"run length {runs[number]} (number {number}) {problem}"
    return f"run lengths sum to {runs.sum()}, {grid}" if runs.sum() != pixels else ""


def write_counts(lengths: Int64[np.ndarray, "T"], offsets: Int64[np.ndarray, "n1"]) -> list[bytes]:
    """Encode masks as COCO's compressed counts, byte for byte as pycocotools does.

    Args:
        lengths: Run lengths of all masks, background first.
        offsets: Start of each mask's run lengths, followed by the end of the last.
    """
    values = lengths.copy()
    later = np.flatnonzero(repeat_index(np.diff(offsets))[1] > 2)
    values[later] -= lengths[later - 2]
    limits = 1 << np.arange(4, 5 * DIGIT_LIMIT - 1, 5)
    sizes = 1 + np.searchsorted(limits, values ^ (values >> 63), "right")
    of, digit = repeat_index(sizes)
    text = ((values[of] >> 5 * digit) & 31) + 48 + 32 * (digit + 1 < sizes[of])
    borders = offsets_of(sizes)[offsets].tolist()
    whole = text.astype(np.uint8).tobytes()
    return [whole[start:stop] for start, stop in pairwise(borders)]
