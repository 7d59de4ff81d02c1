"""Tiny archives in the layouts of published benchmarks, made of synthetic scenes."""

from pathlib import Path

import numpy as np
from PIL import Image
from scipy import io, ndimage

from gigamask.plugins.benchmarks.published import ARCHIVES
from gigamask.synthetic.scenes import compose_scene

VOC_PALETTE = [0, 0, 0, 128, 0, 0, 0, 128, 0, 128, 128, 0, *[7] * (3 * 251), 224, 224, 192]


def write_archive(name: str, folder: Path, count: int = 2) -> list[np.ndarray]:
    """Write a benchmark's archive as it unpacks, and return its labels: 1, 2, ... and -1 where
    pixels are ignored. GrabCut and those like it have one object an image."""
    archive, written = ARCHIVES[name], []
    for sub in (archive.images, archive.masks):
        (folder / sub).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        scene = compose_scene(len(name), number, (96, 120))
        dense = scene.masks.to_dense()[:2]
        labels = np.where(dense[0], 1, 0)
        if archive.kind == "labels":
            labels[dense[1] & ~dense[0]] = 2
        stem = f"2008_{number:06}"
        Image.fromarray(scene.pixels).save(folder / archive.images / f"{stem}.jpg", quality=95)
        written.append(_write_masks(name, folder / archive.masks / stem, labels))
    if archive.listing:
        listing = folder / archive.listing
        listing.parent.mkdir(parents=True, exist_ok=True)
        listing.write_text("".join(f"2008_{number:06}\n" for number in range(count)))
    return written


def _write_masks(name: str, path: Path, labels: np.ndarray) -> np.ndarray:
    """Write one file of masks, and return the labels with -1 where they are to be ignored."""
    band = ndimage.binary_dilation(labels > 0) & (labels == 0)
    if name == "sbd":
        instances = np.zeros(
            (1, 1), [("Segmentation", "O"), ("Boundaries", "O"), ("Categories", "O")]
        )
        found = int(labels.max())
        instances[0, 0] = (labels.astype(np.uint8), np.zeros((found, 1)), np.ones((found, 1)))
        io.savemat(path.with_suffix(".mat"), {"GTinst": instances}, do_compression=True)
        return labels
    if name == "pascalvoc":
        picture = Image.fromarray(np.where(band, 255, labels).astype(np.uint8), "P")
        picture.putpalette(VOC_PALETTE)
        picture.save(path.with_suffix(".png"))
        return np.where(band, -1, labels)
    if name in ("davis", "coco_mval"):
        colors = np.zeros((*labels.shape, 3), np.uint8)
        colors[labels > 0] = (0, 3, 0)
        Image.fromarray(colors).save(path.with_suffix(".png"))
        return labels
    gray = np.where(band, 128, np.where(labels > 0, 255, 0)).astype(np.uint8)
    Image.fromarray(gray).save(path.with_suffix(".bmp" if name == "grabcut" else ".png"))
    return np.where(band, -1, labels)
