"""Boundary F and Boundary IoU against the definitions pixel by pixel, and published code."""

import cv2
import numpy as np
import pytest
from faster_coco_eval.core import mask as faster
from scipy import ndimage

from gigamask.evaluation.boundary import boundary_f, boundary_iou
from gigamask.masks.rle import RLEMasks


def blobs(random: np.random.Generator, count: int, size: tuple[int, int]) -> np.ndarray:
    """Smooth regions with holes and islands, many of which touch the border."""
    noise = random.normal(size=(count, *size)).astype(np.float32)
    return np.array(
        [cv2.GaussianBlur(each, (0, 0), random.uniform(1, 6)) for each in noise]
    ) > random.normal(0, 0.05, (count, 1, 1))


def odd_masks(size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Masks at which definitions part ways."""
    height, width = size
    names = "empty full pixel corner last row column line diagonal ring frame checks".split()
    masks = {name: np.zeros(size, bool) for name in names}
    masks["full"][:] = True
    masks["pixel"][height // 2, width // 2] = True
    masks["corner"][0, 0] = True
    masks["last"][-1, -1] = True
    masks["row"][-1] = True
    masks["column"][:, -1] = True
    masks["line"][height // 3, 1:-1] = True
    masks["diagonal"][np.arange(min(size)), np.arange(min(size))] = True
    masks["ring"][1:-1, 1:-1] = True
    masks["ring"][3:-3, 3:-3] = False
    masks["frame"][:] = True
    masks["frame"][1:-1, 1:-1] = False
    masks["checks"][::2, ::2] = True
    return masks


def seg2bmap(mask: np.ndarray) -> np.ndarray:
    """The boundary map by its definition, one pixel after the other."""
    height, width = mask.shape
    lines = np.zeros(mask.shape, bool)
    for y in range(height):
        for x in range(width):
            right, below = x + 1 < width, y + 1 < height
            if right and below:
                lines[y, x] = (
                    len({mask[y, x], mask[y, x + 1], mask[y + 1, x], mask[y + 1, x + 1]}) > 1
                )
            elif right:
                lines[y, x] = mask[y, x] != mask[y, x + 1]
            elif below:
                lines[y, x] = mask[y, x] != mask[y + 1, x]
    return lines


def f_by_distances(guess: np.ndarray, truth: np.ndarray) -> float:
    """Return DAVIS's F: pixels match up to the radius from the other boundary."""
    found, wanted = seg2bmap(guess), seg2bmap(truth)
    if not found.any() or not wanted.any():
        return float(not found.any() and not wanted.any())
    limit = np.ceil(0.008 * np.linalg.norm(guess.shape))
    near = [ndimage.distance_transform_edt(~lines) <= limit for lines in (found, wanted)]
    precision, recall = (
        (found & near[1]).sum() / found.sum(),
        (wanted & near[0]).sum() / wanted.sum(),
    )
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def band(mask: np.ndarray) -> np.ndarray:
    """Return the mask's pixels with an outside pixel within d king's moves, by square minima."""
    d = max(1, round(0.02 * np.linalg.norm(mask.shape)))
    return mask & ~ndimage.minimum_filter(mask, 2 * d + 1, mode="constant")


def band_of_faster_coco_eval(mask: np.ndarray) -> np.ndarray:
    """Return the same as faster-coco-eval takes it off run lengths."""
    code = {"size": list(mask.shape), "counts": RLEMasks.from_dense(mask[None]).to_coco()[0]}
    return faster.decode(faster.rleToBoundary(code, 0.02)).astype(bool)


def compare(guess: np.ndarray, truth: np.ndarray, band=band) -> None:
    def iou_of_bands(*masks: np.ndarray) -> float:
        one, other = map(band, masks)
        return (one & other).sum() / (one | other).sum() if (one | other).any() else 1.0

    for score, expected in ((boundary_f, f_by_distances), (boundary_iou, iou_of_bands)):
        assert score(guess, truth).tolist() == list(map(expected, guess, truth))


@pytest.mark.parametrize("seed", range(6))
def test_random_blobs(seed):
    random = np.random.default_rng(seed)
    size = tuple(map(int, random.integers(20, 90, 2)))
    truth = blobs(random, 8, size)
    guess = np.array(
        [
            np.roll(mask, random.integers(-4, 5, 2), (0, 1))
            for mask in truth[random.permutation(8) if seed % 2 else np.arange(8)]
        ]
    )
    compare(guess, truth)


@pytest.mark.parametrize("size", [(9, 13), (40, 31), (1, 1), (1, 7), (6, 1), (2, 2)])
def test_every_pair_of_odd_masks(size):
    """Empty, full, one pixel, lines, corners, border; in images of one pixel, row or column."""
    random = np.random.default_rng(0)
    masks = [*odd_masks(size).values(), random.random(size) < 0.5, random.random(size) < 0.1]
    pairs = [(one, other) for one in masks for other in masks]
    guess, truth = (np.array(each) for each in zip(*pairs, strict=True))
    compare(guess, truth)


def test_large_pictures():
    """Radii and widths of more than a pixel or two: 480 x 640 has 7 and 16."""
    random = np.random.default_rng(1)
    truth = (
        np.array(
            [
                cv2.resize(mask.astype(np.uint8), (640, 480), interpolation=cv2.INTER_NEAREST)
                for mask in blobs(random, 3, (60, 80))
            ]
        )
        > 0
    )
    guess = np.array([np.roll(mask, (3, -6), (0, 1)) for mask in truth])
    compare(guess, truth, band_of_faster_coco_eval)
