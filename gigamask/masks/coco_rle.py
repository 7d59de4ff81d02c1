"""COCO's run-length format, read and written for many masks at once.

The format is that of `rleFrString` and `rleToString` in pycocotools' maskApi.c.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import numpy as np
from jaxtyping import Int64, UInt8

from gigamask.errors import GigamaskError
from gigamask.masks.resample import Spans, offsets_of

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
    items = [
        item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item for item in counts
    ]
    texts = [item for item in items if isinstance(item, bytes)]
    if len(texts) == len(items):
        runs, offsets = _decode(texts)
    else:
        parts = [_read_one(index, item) for index, item in enumerate(items)]
        runs = np.concatenate(parts, 1)
        offsets = offsets_of(np.array([part.shape[1] for part in parts]))
    pixels = sizes.prod(1)
    if runs.size and (int(runs.min()) < 0 or int(runs.max()) > int(pixels.max())):
        _refuse_length(runs, offsets, sizes)
    # Each mask's runs sum to the number of its pixels, so one running sum serves all masks. A
    # column of two takes NumPy a quarter of the time of contiguous sums.
    ends = np.zeros((runs.shape[1] + 1, 2), np.int64)[:, 0]
    np.cumsum(runs[0] + runs[1], out=ends[1:])
    totals = np.diff(ends[offsets])
    wrong = np.flatnonzero(totals != pixels)
    if wrong.size:
        mask = int(wrong[0])
        raise GigamaskError(
            f"mask {mask}: run lengths sum to {totals[mask]}, {_grid(sizes[mask])}; {FIX}"
        )
    filled = np.flatnonzero(runs[1])
    end = (ends[1:] - np.repeat(offsets_of(pixels)[:-1], np.diff(offsets)))[filled]
    return Spans(end - runs[1][filled], end, np.searchsorted(filled, offsets))


def _read_one(index: int, item: bytes | Sequence) -> Int64[np.ndarray, "2 r"]:
    """Return the run lengths of one mask."""
    if isinstance(item, bytes):
        return _decode([item], first=index)[0]
    try:
        lengths = np.asarray(item) if len(item) else np.zeros(0, np.int64)
    except (TypeError, ValueError):
        lengths = np.zeros((), object)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or int(lengths.max(initial=0)) >= 2**63:
        raise GigamaskError(
            f"mask {index}: run lengths must be a string or a list of integers below 2**63; {FIX}"
        )
    return np.pad(lengths.astype(np.int64), (0, len(lengths) % 2)).reshape(-1, 2).T


def _decode(
    texts: Sequence[bytes], first: int = 0
) -> tuple[Int64[np.ndarray, "2 r"], Int64[np.ndarray, "n1"]]:
    """Return the lengths of the runs of compressed counts, in pairs.

    A mask whose number of runs is odd has a last foreground of length 0.

    Args:
        texts: Counts of each mask.
        first: Index of the first mask in error messages.

    Returns:
        The lengths of the runs of background, and of foreground after each; and the first pair of
        each mask, followed by the end of the last.
    """
    digits = np.frombuffer(b"".join(texts), np.uint8) - np.uint8(48)
    borders = offsets_of(np.array(list(map(len, texts)), np.int64))
    last = digits < 32
    _check_text(digits, last, borders, first)
    # The last character has the highest five bits, of which the highest is the sign. Most numbers
    # have one or two characters, so that these are decoded at every character.
    numbers = (digits ^ 16).astype(np.int16) - 16
    numbers[1:] += (digits[:-1] >> 5) * (numbers[1:] * 31 + (digits[:-1] & 31))
    ends = np.flatnonzero(last)
    values = numbers[ends].astype(np.int64)
    number_sizes = np.diff(ends, prepend=-1)
    longer, size = np.flatnonzero(number_sizes > 2), 2
    while longer.size:
        if size == DIGIT_LIMIT:
            mask = first + int(np.searchsorted(borders, ends[longer[0]], "right")) - 1
            raise GigamaskError(
                f"mask {mask}: a number has {number_sizes.max()} characters, at most {DIGIT_LIMIT} "
                f"are allowed; {FIX}"
            )
        values[longer] = (values[longer] << 5) | (digits[ends[longer] - size] & 31)
        size += 1
        longer = longer[number_sizes[longer] > size]
    offsets = np.searchsorted(ends, borders)
    is_odd = (np.diff(offsets) & 1).astype(bool)
    pairs = np.insert(values, offsets[1:][is_odd], 0).reshape(-1, 2)
    offsets = (offsets + offsets_of(is_odd)) >> 1
    runs = _undo_differences(pairs, offsets)
    runs[1, offsets[1:][is_odd] - 1] = 0
    return runs, offsets


def _check_text(
    digits: UInt8[np.ndarray, "t"], last: np.ndarray, borders: Int64[np.ndarray, "n1"], first: int
) -> None:
    """Raise `GigamaskError` for invalid characters, and for counts that end within a number."""
    if digits.size and int(digits.max()) > 63:
        index = int((digits > 63).argmax())
        mask = int(np.searchsorted(borders, index, "right")) - 1
        byte, position = (int(digits[index]) + 48) % 256, index - int(borders[mask])
        raise GigamaskError(
            f"mask {first + mask}: byte {byte} at position {position} of the counts is not in "
            f"48 to 111; {FIX}"
        )
    filled = borders[1:] > borders[:-1]
    truncated = np.flatnonzero(filled)[~last[borders[1:][filled] - 1]]
    if truncated.size:
        raise GigamaskError(
            f"mask {first + int(truncated[0])}: the counts end within a number; {FIX}"
        )


def _undo_differences(
    pairs: Int64[np.ndarray, "r 2"], offsets: Int64[np.ndarray, "n1"]
) -> Int64[np.ndarray, "2 r"]:
    """Return run lengths from COCO's differences.

    From the fourth number of a mask on, each is stored relative to the one two before it.
    """
    sums = np.zeros((len(pairs) + 1, 2), np.int64)
    np.cumsum(pairs, axis=0, out=sums[1:])
    counts, starts = np.diff(offsets), offsets[:-1]
    runs = np.empty((2, len(pairs)), np.int64)
    # No background is relative to the first.
    for side, before in enumerate((np.minimum(starts + 1, len(pairs)), starts)):
        np.subtract(sums[1:, side], np.repeat(sums[before, side], counts), out=runs[side])
    heads = starts[counts > 0]
    runs[0, heads] = pairs[heads, 0]
    return runs


def _refuse_length(
    runs: Int64[np.ndarray, "2 r"],
    offsets: Int64[np.ndarray, "n1"],
    sizes: Int64[np.ndarray, "n 2"],
) -> NoReturn:
    """Raise `GigamaskError` for the first run that is negative or longer than any mask."""
    pair, side = map(int, np.argwhere(((runs < 0) | (runs > sizes.prod(1).max())).T)[0])
    mask = int(np.searchsorted(offsets, pair, "right")) - 1
    length, number = runs[side, pair], 2 * (pair - int(offsets[mask])) + side
    problem = "is negative" if length < 0 else f"is too long, {_grid(sizes[mask])}"
    raise GigamaskError(f"mask {mask}: run length {length} (number {number}) {problem}; {FIX}")


def _grid(size: Int64[np.ndarray, "2"]) -> str:
    return f"the image has {size[0]} x {size[1]} = {size.prod()} pixels"


def write_counts(lengths: Int64[np.ndarray, "T"], offsets: Int64[np.ndarray, "n1"]) -> list[bytes]:
    """Encode masks as COCO's compressed counts, byte for byte as pycocotools does.

    Args:
        lengths: Run lengths of all masks, background first.
        offsets: Start of each mask's run lengths, followed by the end of the last.
    """
    sizes = np.diff(offsets)
    index = np.arange(len(lengths)) - np.repeat(offsets[:-1], sizes)
    values = lengths.copy()
    later = np.flatnonzero(index > 2)
    values[later] -= lengths[later - 2]
    digits = np.ones(len(values), np.int64)
    for bits in range(4, 5 * DIGIT_LIMIT - 1, 5):
        digits += (values < -(1 << bits)) | (values >= 1 << bits)
    ends = np.cumsum(digits)
    starts = ends - digits
    text = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    for k in range(int(digits.max(initial=0))):
        longer = np.flatnonzero(digits > k)
        text[starts[longer] + k] = (
            ((values[longer] >> (5 * k)) & 31) + 48 + 32 * (digits[longer] > k + 1)
        )
    borders = np.concatenate([np.zeros(1, np.int64), ends])[offsets].tolist()
    whole = text.tobytes()
    return [whole[start:stop] for start, stop in pairwise(borders)]
