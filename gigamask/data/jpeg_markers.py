"""JPEGs that lack only their end marker, which cameras and interrupted copies leave behind.

All of their rows are there, so other programs show them without a word. Whether all are is decided
by decoding strictly once the marker is added; a progressive file must also have all its scans,
because it may end after any of them and still decode, as a blurred image.
"""

from collections.abc import Iterator

START, END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1, 0xC2)
"""Markers of the frame header: baseline, extended and progressive."""
SCAN = 0xDA
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD8))
"""Markers that no segment follows."""
_COEFFICIENTS = 64


def with_end(raw: bytes) -> bytes:
    """Return a JPEG with its end marker if that alone is missing, and any other file unchanged.

    Args:
        raw: The file.
    """
    if not raw.startswith(START) or raw.endswith(END):
        return raw
    ended = raw + (END[1:] if raw.endswith(END[:1]) else END)
    markers = [marker for marker, _ in segments(raw)]
    return raw if END[1] in markers or not _has_all_scans(ended) else ended


def _has_all_scans(raw: bytes) -> bool:
    """Return whether every coefficient of every component is stated to its last bit."""
    missing: dict[int, set[int]] = {}
    for marker, segment in segments(raw):
        if marker in _FRAMES and len(segment) >= 6 + 3 * segment[5]:
            missing = {segment[6 + 3 * i]: set(range(_COEFFICIENTS)) for i in range(segment[5])}
        elif marker == SCAN and len(segment) >= 4 + 2 * segment[0]:
            count = segment[0]
            first, last, bits = segment[1 + 2 * count : 4 + 2 * count]
            if bits & 15 == 0:  # the last bit of these coefficients
                for i in range(count):
                    missing.get(segment[1 + 2 * i], set()).difference_update(range(first, last + 1))
    return bool(missing) and not any(missing.values())


def segments(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each marker with its segment, passing over what is coded between them.

    Args:
        raw: The file.
    """
    at = raw.find(b"\xff", 2)
    while 0 <= at < len(raw) - 1:
        marker = raw[at + 1]
        if marker in (0x00, 0xFF, *_WITHOUT_LENGTH):
            at = raw.find(b"\xff", at + (1 if marker == 0xFF else 2))
            continue
        length = int.from_bytes(raw[at + 2 : at + 4])
        yield marker, raw[at + 4 : at + 2 + length]
        if marker == END[1]:
            break
        at = raw.find(b"\xff", at + 2 + length)
