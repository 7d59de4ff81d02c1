"""COCO's run-length format, read and written for many masks at once.

The format is that of `rleFrString` and `rleToString` in pycocotools' maskApi.c.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int64, UInt8

from gigamask.errors import GigamaskError

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


def read_counts(
    counts: Sequence[bytes | str | Sequence], size: tuple[int, int]
) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "n1"]]:
    """Decode and validate the counts of masks.

    Memory is limited by the length of the counts, not by the size that they claim.

    Args:
        counts: Counts of each mask, compressed strings or lists of integers.
        size: Size of the masks, (H, W).

    Returns:
        Run lengths of all masks, background first, and the start of each mask's, followed by the
        end of the last. All lengths are in [0, H * W], and those of a mask sum to H * W.

    Raises:
        GigamaskError: Counts are not valid; the message has the index of the mask.
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
    """Return the run lengths of one mask."""
    if isinstance(item, bytes):
        return _decode(item, [len(item)], first=index)[0]
    try:
        lengths = np.asarray(item) if len(item) else np.zeros(0, np.int64)
    except (TypeError, ValueError):
        lengths = np.zeros((), object)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or int(lengths.max(initial=0)) >= 2**63:
        raise GigamaskError(
            f"mask {index}: run lengths must be a string or a list of integers below 2**63; {FIX}"
        )
    return lengths.astype(np.int64)


def _decode(
    text: bytes, sizes: list[int], first: int = 0
) -> tuple[Int64[np.ndarray, "T"], Int64[np.ndarray, "n1"]]:
    """Return run lengths and offsets of compressed counts; mask i has `sizes[i]` characters.

    `first` is the index of the first mask in error messages.
    """
    digits = np.frombuffer(text, np.uint8) - np.uint8(48)
    borders = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=borders[1:])
    last = digits < 32
    _check_text(digits, last, borders, first)
    ends = np.flatnonzero(last)
    number_sizes = np.diff(ends, prepend=-1)
    longest = int(number_sizes.max(initial=0))
    if longest > DIGIT_LIMIT:
        mask = first + int(np.searchsorted(borders, ends[number_sizes.argmax()], "right")) - 1
        raise GigamaskError(
            f"mask {mask}: a number has {longest} characters, at most {DIGIT_LIMIT} are allowed; "
            f"{FIX}"
        )
    # The last character has the highest five bits, of which the highest is the sign.
    values = ((digits[ends] ^ 16).astype(np.int64)) - 16
    for digit in range(1, longest):
        longer = np.flatnonzero(number_sizes > digit)
        values[longer] = (values[longer] << 5) | (digits[ends[longer] - digit] & 31)
    offsets = np.searchsorted(ends, borders)
    return _undo_differences(values, offsets), offsets


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
    values: Int64[np.ndarray, "T"], offsets: Int64[np.ndarray, "n1"]
) -> Int64[np.ndarray, "T"]:
    """Return run lengths from COCO's differences.

    From the fourth number of a mask on, each is stored relative to the one two before it.
    """
    sums = np.empty_like(values)
    np.cumsum(values[0::2], out=sums[0::2])
    np.cumsum(values[1::2], out=sums[1::2])
    # Subtract the sum up to the mask's first number at even positions in the mask, and the sum up
    # to the number before the mask at odd ones.
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
    """Raise `GigamaskError` unless the run lengths of every mask sum to its number of pixels."""
    grid = f"the image has {size[0]} x {size[1]} = {pixels} pixels"
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > pixels):
        index = int(((lengths < 0) | (lengths > pixels)).argmax())
        mask = int(np.searchsorted(offsets, index, "right")) - 1
        problem = "is negative" if lengths[index] < 0 else f"is too long, {grid}"
        raise GigamaskError(
            f"mask {mask}: run length {lengths[index]} (number {index - int(offsets[mask])}) "
            f"{problem}; {FIX}"
        )
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    totals = np.diff(sums[offsets])
    wrong = np.flatnonzero(totals != pixels)
    if wrong.size:
        mask = int(wrong[0])
        raise GigamaskError(f"mask {mask}: run lengths sum to {totals[mask]}, {grid}; {FIX}")


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
