"""TIFFs as other programs write them, with tags that Pillow does not."""

import struct

import numpy as np


def tiff(
    pixels: np.ndarray, planes: int = 1, photometric: int = 1, sample_format: int = 1
) -> bytes:
    """Return an uncompressed file of one page.

    Args:
        pixels: (H, W) or (H, W, C).
        planes: TIFF's PlanarConfiguration: 2 stores each channel apart.
        photometric: 0: zero is white, 1: black, 2: RGB.
        sample_format: 1: unsigned, 2: signed, 3: floats.
    """
    height, width, channels = np.atleast_3d(pixels).shape
    data = np.moveaxis(pixels, 2, 0).tobytes() if planes == 2 else pixels.tobytes()
    tags, at = [], 8 + len(data)

    def add(tag: int, *values: int) -> None:
        kind, size = ("H", 3) if max(values) < 2**16 else ("I", 4)
        tags.append((tag, size, len(values), struct.pack(f"<{len(values)}{kind}", *values)))

    count = channels if planes == 2 else 1
    add(256, width)
    add(257, height)
    add(258, *[8 * pixels.itemsize] * channels)
    add(259, 1)
    add(262, photometric)
    add(273, *[8 + i * (len(data) // count) for i in range(count)])
    add(277, channels)
    add(278, height)
    add(279, *[len(data) // count] * count)
    add(284, planes)
    if photometric == 2 and channels > 3:
        add(338, *[0] * (channels - 3))
    add(339, *[sample_format] * channels)
    entries, more = b"", b""
    after = at + 2 + 12 * len(tags) + 4
    for tag, kind, number, raw in tags:
        if len(raw) > 4:
            raw, more = struct.pack("<I", after + len(more)), more + raw
        entries += struct.pack("<HHI", tag, kind, number) + raw.ljust(4, b"\0")
    directory = struct.pack("<H", len(tags)) + entries + bytes(4) + more
    return b"II*\0" + struct.pack("<I", at) + data + directory
