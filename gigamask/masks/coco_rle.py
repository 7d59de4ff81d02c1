"""COCO's run-length text in both directions, for many masks at once.

Enters: `counts` as COCO writes them (compressed strings or plain lists) and the image size. Leaves: run lengths that are known to be sound,
background first, in column-major order; and back to strings. Format: `rleFrString` and `rleToString` of pycocotools' maskApi.c.

Not here: what is done with masks (`runs`), the json around the counts (`data.annotation`).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, UInt8

from gigamask.errors import GigamaskError

PIXEL_LIMIT = 2**30
"""The largest grid, in pixels: positions then fit int32 with a bit to spare."""

DIGIT_LIMIT = 7
"""Characters one number may have: five bits each, and a difference of two run lengths below `PIXEL_LIMIT` needs 31."""


def check_size(size: tuple[int, int]) -> int:
    """Returns the number of pixels of a grid `(H, W)`, or raises a `GigamaskError`."""
    height, width = size
    if height < 1 or width < 1:
        raise GigamaskError(
            f"size {height} x {width}: a mask needs at least one pixel; leave the image out"
        )
    if height * width > PIXEL_LIMIT:
        raise GigamaskError(
            f"size {height} x {width}: masks may have {PIXEL_LIMIT} pixels at most; leave the image out or scale it down"
        )
    return height * width


def read_counts(
    counts: Sequence[bytes | str | Sequence], size: tuple[int, int]
) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "n1"]]:
    """Returns all masks' run lengths on one axis and where each mask begins; mask i owns `lengths[offsets[i]:offsets[i + 1]]`.

    Every length is in [0, H * W] and every mask's lengths sum to H * W; anything else raises a `GigamaskError` that names the mask.
    Memory is bounded by the text, not by the size it claims.
    """
    pixels = check_size(size)
    items = [
        item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item for item in counts
    ]
    texts = [item for item in items if isinstance(item, bytes)]
    if len(texts) == len(items):
        lengths, offsets = _decode(b"".join(texts), [len(text) for text in texts])
    else:
        parts = [_read_one(index, item) for index, item in enumerate(items)]
        lengths = np.concatenate(parts)
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    _check_lengths(lengths, offsets, pixels, size)
    return lengths, offsets


def _read_one(index: int, item: bytes | Sequence) -> Int64[np.ndarray, "k"]:
    """Returns one mask's run lengths, whichever way they are written."""
    if isinstance(item, bytes):
        return _decode(item, [len(item)], first=index)[0]
    try:
        lengths = np.asarray(item) if len(item) else np.zeros(0, np.int64)
    except (TypeError, ValueError):
        lengths = np.zeros((), object)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or int(lengths.max(initial=0)) >= 2**63:
        raise GigamaskError(
            f"mask {index}: run lengths must be a string or a list of whole numbers below 2**63; leave this mask out or write it again"
        )
    return lengths.astype(np.int64)


def _decode(
    text: bytes, sizes: list[int], first: int = 0
) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "n1"]]:
    """Returns the run lengths written in `text`, where mask i (counted from `first` in messages) has `sizes[i]` characters."""
    digits = np.frombuffer(text, np.uint8) - np.uint8(48)
    borders = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=borders[1:])
    last = digits < 32
    _check_text(digits, last, borders, first)
    ends = np.flatnonzero(last)
    sizes_of_numbers = np.diff(ends, prepend=-1)
    longest = int(sizes_of_numbers.max(initial=0))
    if longest > DIGIT_LIMIT:
        mask = first + int(np.searchsorted(borders, ends[sizes_of_numbers.argmax()], "right")) - 1
        raise GigamaskError(
            f"mask {mask}: a number of {longest} characters, run lengths have {DIGIT_LIMIT} at most; leave this mask out or write it again"
        )
    # The last character holds the highest five bits, the topmost of which is the sign.
    values = ((digits[ends] ^ 16).astype(np.int64)) - 16
    for place in range(1, longest):
        longer = np.flatnonzero(sizes_of_numbers > place)
        values[longer] = (values[longer] << 5) | (digits[ends[longer] - place] & 31)
    offsets = np.searchsorted(ends, borders)
    return _undo_differences(values, offsets), offsets


def _check_text(
    digits: UInt8[np.ndarray, "t"], last: np.ndarray, borders: Int64[np.ndarray, "n1"], first: int
) -> None:
    """Raises a `GigamaskError` for characters outside COCO's alphabet and for text that ends within a number."""
    if digits.size and int(digits.max()) > 63:
        place = int((digits > 63).argmax())
        mask = int(np.searchsorted(borders, place, "right")) - 1
        character = (int(digits[place]) + 48) % 256
        raise GigamaskError(
            f"mask {first + mask}: byte {character} at character {place - int(borders[mask])} of the counts, they hold bytes 48 to 111; "
            "leave this mask out or write it again"
        )
    filled = borders[1:] > borders[:-1]
    cut = np.flatnonzero(filled)[~last[borders[1:][filled] - 1]]
    if cut.size:
        raise GigamaskError(
            f"mask {first + int(cut[0])}: the counts end within a number; leave this mask out or write it again"
        )


def _undo_differences(
    values: Int64[np.ndarray, "T"], offsets: Int64[np.ndarray, "n1"]
) -> Int64[np.ndarray, "T"]:
    """Returns run lengths from COCO's differences: from the fourth number of a mask on, each is written relative to the second before it."""
    sums = np.empty_like(values)
    np.cumsum(values[0::2], out=sums[0::2])
    np.cumsum(values[1::2], out=sums[1::2])
    # What the running sums held before this mask: its own first number for every second one, the number before the mask for the others.
    padded = np.concatenate([np.zeros(2, np.int64), sums])
    sizes = np.diff(offsets)
    parity = (np.arange(len(values)) - np.repeat(offsets[:-1], sizes)) & 1
    own = padded[np.minimum(offsets[:-1] + 2, len(padded) - 1)]
    before = padded[offsets[:-1] + 1]
    lengths = sums - np.where(parity, np.repeat(before, sizes), np.repeat(own, sizes))
    heads = offsets[:-1][sizes > 0]
    lengths[heads] = values[heads]
    return lengths


def _check_lengths(
    lengths: Int64[np.ndarray, "T"],
    offsets: Int64[np.ndarray, "n1"],
    pixels: int,
    size: tuple[int, int],
) -> None:
    """Raises a `GigamaskError` unless every mask's run lengths are a partition of the grid."""
    grid = f"the image has {size[0]} x {size[1]} = {pixels} pixels"
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > pixels):
        place = int(((lengths < 0) | (lengths > pixels)).argmax())
        mask = int(np.searchsorted(offsets, place, "right")) - 1
        what = "is negative" if lengths[place] < 0 else f"is too long, {grid}"
        raise GigamaskError(
            f"mask {mask}: run length {lengths[place]} (number {place - int(offsets[mask])}) {what}; leave this mask out or write it again"
        )
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    totals = np.diff(sums[offsets])
    wrong = np.flatnonzero(totals != pixels)
    if wrong.size:
        mask = int(wrong[0])
        raise GigamaskError(
            f"mask {mask}: run lengths sum to {totals[mask]}, {grid}; leave this mask out or write it again"
        )


def write_counts(lengths: Int64[np.ndarray, "T"], offsets: Int64[np.ndarray, "n1"]) -> list[bytes]:
    """Returns each mask's run lengths as COCO's compressed string, byte for byte what pycocotools writes."""
    sizes = np.diff(offsets)
    place = np.arange(len(lengths)) - np.repeat(offsets[:-1], sizes)
    values = lengths.copy()
    later = np.flatnonzero(place > 2)
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
