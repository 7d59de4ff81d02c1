"""Label images: a folder of PNGs enters whose pixels name their instance, one `LabelImage` each leaves, which reads its masks when asked.

Values: grey of 8 or 16 bits, the index of a palette, or R + 256 G + 65536 B as COCO's panoptic images have them. 0 is background.
A picture is the file of the same name, and in the same subfolder, in the folder of pictures.

Not here: pictures (`prepare.pictures`), shards (`prepare.convert`).
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from jaxtyping import Int32

from gigamask.data.annotation import MAX_MASKS, MAX_SIDE
from gigamask.datatools.objects import Annotated, Objects, SourceListing, numbers
from gigamask.datatools.pictures import FORMATS, opened
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks, from_keys
from gigamask.types import SkippedSample

GREY = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow's names of pixels that are one number each."""


@dataclass(frozen=True)
class LabelImage(Annotated):
    """One picture and the label image that belongs to it."""

    label: Path
    split: bool
    ignore: tuple[int, ...]

    def objects(self) -> Objects:
        """Reads the masks: one for each value, or for each connected component of it."""
        labels = _read(self.label, self.source)
        labels[np.isin(labels, self.ignore)] = 0
        masks, values = _masks(labels, self.source)
        if self.split:
            parts, owners = _components(labels, masks, values)
            masks, _ = _masks(parts, self.source)
            values = owners
        return Objects(masks, [{"label": value} for value in values.tolist()], [])


def read(
    labels: Path, pictures: Path, split: bool = False, ignore: tuple[int, ...] = ()
) -> SourceListing:
    """Lists the label images of a folder and its subfolders, and the pictures that belong to them."""
    files = sorted(path for path in labels.rglob("*") if path.suffix.lower() == ".png")
    if not files:
        raise GigamaskError(
            f"{labels}: the folder holds no .png; give a folder of label images, or COCO's instances json"
        )
    known = set(files)
    found: dict[Path, list[Path]] = defaultdict(list)
    for path in sorted(pictures.rglob("*")):
        if path.suffix.lower() in FORMATS and path not in known:
            found[path.relative_to(pictures).with_suffix("")].append(path)
    given, renumbered = numbers([path.stem for path in files])
    images, rejected = [], []
    for number, path in zip(given, files, strict=True):
        name = (
            str(path.relative_to(labels)).encode("utf-8", "replace").decode()
        )  # a name may hold bytes that no text can
        held = found.pop(path.relative_to(labels).with_suffix(""), [])
        if len(held) == 1:
            images.append(LabelImage(number, name, held[0], path, split, ignore))
            continue
        what = (
            f"{len(held)} pictures have its name"
            if held
            else f"no picture is called {Path(name).stem} with {', '.join(FORMATS)}"
        )
        rejected.append(
            SkippedSample(
                name,
                f"{name}: {what} in {(pictures / name).parent}; put one picture there under the label image's name",
            )
        )
    return SourceListing(images, rejected, renumbered, unlabelled=sum(map(len, found.values())))


def _read(path: Path, name: str) -> Int32[np.ndarray, "H W"]:
    """Returns each pixel's value."""
    try:
        with opened(path.read_bytes(), ("PNG",), name) as label:
            height, width = label.height, label.width
            if max(height, width) > MAX_SIDE:
                raise CorruptSampleError(
                    f"{name}: the label image has {height} x {width} pixels, sides are {MAX_SIDE} at most; leave it out"
                )
            if label.mode not in (*GREY, "RGB"):
                raise CorruptSampleError(
                    f"{name}: the label image's pixels are {label.mode}, known are grey, palette and RGB; save it as one of these"
                )
            pixels = np.array(label)
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, CorruptSampleError):
            raise
        raise CorruptSampleError(
            f"{name}: the label image {path} cannot be decoded ({error}); save it again or leave it out"
        ) from error
    if pixels.ndim == 3:
        return pixels.astype(np.int32) @ np.array([1, 256, 65536], np.int32)
    return pixels.astype(np.int32)


def _masks(labels: Int32[np.ndarray, "H W"], name: str) -> tuple[RLEMasks, Int32[np.ndarray, "n"]]:
    """Returns one mask for each value but 0, and the values, ascending."""
    flat = labels.T.ravel()
    pixels = len(flat)
    edges = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1, [pixels]])
    runs = flat[edges[:-1]]
    filled = runs != 0
    values, rank = np.unique(runs[filled], return_inverse=True)
    if len(values) > MAX_MASKS:
        raise CorruptSampleError(
            f"{name}: the label image has {len(values)} instances, at most {MAX_MASKS} are read; is it a picture? leave it out"
        )
    keys = np.concatenate(
        [rank * (pixels + 1) + edges[:-1][filled], rank * (pixels + 1) + edges[1:][filled]]
    )
    return from_keys(labels.shape, len(values), np.sort(keys), pixels + 1), values


def _components(
    labels: Int32[np.ndarray, "H W"], masks: RLEMasks, values: Int32[np.ndarray, "n"]
) -> tuple[Int32[np.ndarray, "H W"], Int32[np.ndarray, "k"]]:
    """Returns labels that number the connected components (by edge or corner) from 1 on, and the value each had."""
    parts = np.zeros_like(labels)
    counts, total = np.zeros(len(values), np.int64), 0
    for i, (x0, y0, x1, y1) in enumerate(masks.boxes().tolist()):
        place = (slice(y0, y1 + 1), slice(x0, x1 + 1))
        inside = labels[place] == values[i]
        found, numbered = cv2.connectedComponents(inside.astype(np.uint8), connectivity=8)
        parts[place][inside] = numbered[inside] + total
        counts[i] = found - 1
        total += found - 1
    return parts, np.repeat(values, counts)
