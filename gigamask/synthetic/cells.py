"""Synthetic micrographs in SA-1B's format: round cells that touch, with noise and uneven light.

They look unlike photographs and `scenes`, so they show what fine-tuning gives on another kind of
image. The bytes of image N depend only on (seed, N).
"""

import cv2
import numpy as np
from jaxtyping import Int32, UInt8, UInt16

from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng
from gigamask.synthetic.scenes import LONG_SIDE, SyntheticScene
from gigamask.synthetic.shapes import OUTLINES, affine, circle, compose, rasterize
from gigamask.synthetic.textures import Plane, make_pattern

RADIUS_SHARE = (0.025, 0.07)
"""Range of the mean radius of an image's cells, as a fraction of the long side."""
COVERED_SHARE = (0.15, 0.55)
"""Range of the area of all cells, as a fraction of the image, before they are cut off."""
MAX_CELLS = 200
MAX_OVERLAP_SHARE = 0.15
"""Largest fraction of a cell that may lie on cells drawn before."""
MIN_AREA_PX = 40
BLACK_COUNTS, COUNTS_PER_LEVEL = 400, 24
"""Value of black in 16 bits, and values for each of the 256 levels of 8 bits."""


def compose_cells(
    seed: int, number: int, long_side: tuple[int, int] = LONG_SIDE, bits: int = 8
) -> SyntheticScene:
    """Draw a micrograph; each cell, with its nucleus, has one mask.

    Args:
        seed: Random seed of the micrographs.
        number: Number of the image.
        long_side: Range of the longer side in pixels.
        bits: Bits of a pixel; 8 in three equal channels, 16 in one, of which a camera fills 13.
    """
    generator = make_rng(seed, "cells", number)
    long = int(generator.integers(long_side[0], long_side[1] + 1))
    size = (max(2, int(long * generator.uniform(0.75, 1.0))), long)
    brightness = np.zeros(size, np.float32)
    owner = np.zeros(size, np.int32)
    _draw_cells(generator, brightness, owner)
    numbers = np.flatnonzero(np.bincount(owner.ravel())[1:] >= MIN_AREA_PX) + 1
    masks = RLEMasks.from_dense(owner == numbers[:, None, None])
    return SyntheticScene(
        pixels=_expose(generator, brightness, bits),
        masks=masks,
        predicted_iou=generator.uniform(0.88, 1.0, len(masks)),
        stability_score=generator.uniform(0.92, 1.0, len(masks)),
        points_xy=masks.sample_points(generator.random((len(masks), 1)))[:, 0],
    )


def _draw_cells(
    generator: np.random.Generator,
    brightness: Plane,
    owner: Int32[np.ndarray, "H W"],
) -> None:
    """Draw cells that touch but hardly overlap."""
    height, width = owner.shape
    mean_radius = width * np.exp(generator.uniform(*np.log(RADIUS_SHARE)))
    to_cover = owner.size * generator.uniform(*COVERED_SHARE)
    contrast, membrane = generator.uniform(35, 90), generator.uniform(0, 35)
    nucleus = generator.uniform(0, 70)
    cells = 0
    for _ in range(4 * MAX_CELLS):
        if to_cover <= 0 or cells == MAX_CELLS:
            break
        radius = mean_radius * np.exp(generator.normal(0, 0.18))
        center = generator.uniform(0, 1, 2) * (width, height)
        axes = (radius, radius * generator.uniform(0.7, 1))
        transform = affine(center, axes, generator.uniform(0, np.pi))
        window = rasterize(OUTLINES["blob"](generator), transform, owner.shape)
        if window is None:
            continue
        area, inside = window.slices, window.pixels.view(bool)
        free = inside & (owner[area] == 0)
        if free.sum() < (1 - MAX_OVERLAP_SHARE) * inside.sum():
            continue
        cells += 1
        to_cover -= int(free.sum())
        owner[area][free] = cells
        _, cloud = make_pattern(generator, "cloud", inside.shape, max(4.0, radius * 0.5))
        level = contrast * generator.uniform(0.7, 1.3) * (0.75 + 0.5 * cloud)
        side = 2 * max(1, round(radius / 8)) + 1
        disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
        within = cv2.erode(window.pixels, disc, borderType=cv2.BORDER_CONSTANT, borderValue=0)
        level += membrane * (within == 0)
        brightness[area][free] = level[free]
        inner = compose(transform, affine(generator.uniform(-0.2, 0.2, 2), 0.45))
        core = rasterize([circle()], inner, owner.shape)
        if core is not None:
            within = core.pixels.view(bool) & (owner[core.slices] == cells)
            brightness[core.slices][within] += nucleus


def _expose(
    generator: np.random.Generator, brightness: Plane, bits: int
) -> UInt8[np.ndarray, "H W 3"] | UInt16[np.ndarray, "H W"]:
    """Render in gray, with blur, uneven light, photon noise and sensor noise."""
    height, width = brightness.shape
    plane = cv2.GaussianBlur(brightness, (0, 0), generator.uniform(0.6, 1.4))
    lit = generator.uniform(0.75, 1.2, (3, 3)).astype(np.float32)
    plane = plane + generator.uniform(15, 60)
    plane *= cv2.resize(lit, (width, height), interpolation=cv2.INTER_CUBIC)
    photons = generator.uniform(0.5, 4)
    plane = generator.poisson(np.maximum(plane, 0) * photons) / photons
    plane += generator.normal(0, generator.uniform(1, 5), plane.shape)
    if generator.random() < 0.3:  # bright field: dark cells on a bright ground
        plane = 230 - plane
    if bits == 16:
        counts = np.round(plane * COUNTS_PER_LEVEL + BLACK_COUNTS)
        return np.clip(counts, 0, 2**16 - 1).astype(np.uint16)
    gray = np.clip(np.round(plane), 0, 255).astype(np.uint8)
    return np.repeat(gray[:, :, None], 3, 2)
