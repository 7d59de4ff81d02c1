"""LVIS's average precision against its definition, written out mask by mask.

The definition is that of the package lvis 0.5.3 (`LVISResults` and `LVISEval`): the best 300 masks
of an image over all classes; per class, only images where it was looked for; an unmatched mask is
ignored where not all objects of its class are annotated; masks without a pixel do not count.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from gigamask.errors import GigamaskError
from gigamask.evaluation import coco_ap
from gigamask.evaluation.coco_ap import LVIS, ImageDetections, coco_metrics
from tests.parity.test_average_precision import scene

AREAS = {"": (0, 1e10), " small": (0, 32**2), " medium": (32**2, 96**2), " large": (96**2, 1e10)}
FEW = replace(LVIS, max_found=(12,))
"""LVIS's statistics of the best 12 masks of an image, not 300."""
THRESHOLDS = np.linspace(0.5, 0.95, 10)


def match(ious: np.ndarray, ignored: np.ndarray, threshold: float) -> list[int]:
    """The annotated mask that each predicted one takes, best score first; -1: none."""
    taken: list[int] = []
    for row in ious:
        free = [i for i in range(len(row)) if i not in taken and row[i] >= threshold - 1e-12]
        counted = [i for i in free if not ignored[i]]
        # The last of equal ones, as the reference's loop does.
        best = max(counted or free, key=lambda i: (row[i], i), default=-1)
        taken.append(best)
    return taken


@cache
def judge(image: ImageDetections, category: int) -> tuple[np.ndarray, ...] | None:
    """IoUs, areas, scores and whether a mistake counts, of one class in one image."""
    truth = [i for i, area in enumerate(image.truth.areas()) if area]
    of_class = [i for i in truth if image.truth_classes[i] == category]
    if not of_class and category not in image.negative_classes:
        return None
    best = sorted(range(len(image.scores)), key=lambda i: -image.scores[i])[: FEW.max_found[0]]
    found = [i for i in best if image.detection_classes[i] == category]
    found = [i for i in found if image.detections.areas()[i]]
    a, b = image.detections[np.array(found, int)], image.truth[np.array(of_class, int)]
    counts = np.full(len(found), category not in image.not_exhaustive_classes)
    return a.iou(b), a.areas(), b.areas(), image.scores[np.array(found, int)], counts


def precision_and_recall(
    images: list[ImageDetections], category: int, low: float, high: float, threshold: float
) -> tuple[float, float] | None:
    scores, right, wrong, total = [], [], [], 0
    for image in images:
        judged = judge(image, category)
        if judged is None:
            continue
        ious, found_areas, areas, confidence, counts = judged
        ignored = (areas < low) | (areas > high)
        total += int((~ignored).sum())
        for i, taken in enumerate(match(ious, ignored, threshold)):
            outside = not low <= found_areas[i] <= high
            if ignored[taken] if taken >= 0 else outside or not counts[i]:
                continue
            scores.append(confidence[i])
            right.append(taken >= 0)
            wrong.append(taken < 0)
    if not total:
        return None
    order = np.argsort(-np.array(scores), kind="stable")
    hits = np.cumsum(np.array(right, float)[order])
    misses = np.cumsum(np.array(wrong, float)[order])
    recall, precision = hits / total, hits / np.maximum(hits + misses, 1)
    at = [max(precision[recall >= level], default=0.0) for level in np.linspace(0, 1, 101)]
    return float(np.mean(at)), float(recall[-1]) if len(recall) else 0.0


def by_definition(
    images: list[ImageDetections], frequencies: Mapping[int, str]
) -> dict[str, float | None]:
    def mean(
        which: int, categories: list[int], size: str = "", thresholds: np.ndarray = THRESHOLDS
    ) -> float | None:
        each = [
            precision_and_recall(images, category, *AREAS[size], threshold)
            for category in categories
            for threshold in thresholds
        ]
        values = [pair[which] for pair in each if pair is not None]
        return float(np.mean(values)) if values else None

    every = sorted(frequencies)
    groups = {"rare": "r", "common": "c", "frequent": "f"}
    return (
        {"AP": mean(0, every)}
        | {f"AP{5 * i + 50}": mean(0, every, "", THRESHOLDS[i : i + 1]) for i in (0, 5)}
        | {f"AP{size}": mean(0, every, size) for size in AREAS if size}
        | {
            f"AP {name}": mean(0, [each for each in every if frequencies[each] == letter])
            for name, letter in groups.items()
        }
        | {f"AR@12{size}": mean(1, every, size) for size in AREAS}
    )


FREQUENCIES = {0: "r", 1: "c", 2: "f", 3: "f"}


def federated_scene(random: np.random.Generator, founds: int, levels: int) -> ImageDetections:
    """An image of which some classes are known to be absent, or not all annotated."""
    image = replace(scene(random, int(random.integers(0, 8)), founds, levels), crowd=None)
    absent, partial = (tuple(map(int, random.choice(4, 2, False))) for _ in range(2))
    return replace(image, negative_classes=absent, not_exhaustive_classes=partial)


@pytest.mark.parametrize(("seed", "pairs"), [(0, 2**21), (1, 2**21), (2, 12)])
def test_random_images(seed, pairs, monkeypatch):
    """Classes are evaluated together, and one at a time."""
    monkeypatch.setattr(coco_ap, "PAIRS", pairs)
    random = np.random.default_rng(seed)
    images = [federated_scene(random, int(random.integers(0, 20)), 1000) for _ in range(10)]
    result, expected = coco_metrics(images, FEW, FREQUENCIES), by_definition(images, FREQUENCIES)
    assert [name for name in result if name[:2] in ("AP", "AR")] == list(expected)
    for name, value in expected.items():
        assert result[name] == (value if value is None else pytest.approx(value, abs=1e-9)), name
    assert result["AP"] != coco_metrics(images)["AP"]


def test_what_federation_changes():
    """If every class was looked for, masks score as in COCO, but for those without a pixel."""
    random = np.random.default_rng(3)
    everywhere, images = (0, 1, 2, 3), []
    for _ in range(8):
        image = federated_scene(random, 9, 1000)
        drawn, found = (masks.areas() > 0 for masks in (image.truth, image.detections))
        image = replace(
            image,
            truth=image.truth[drawn],
            truth_classes=image.truth_classes[drawn],
            detections=image.detections[found],
            detection_classes=image.detection_classes[found],
            scores=image.scores[found],
        )
        images.append(replace(image, negative_classes=everywhere))
    complete = [replace(image, not_exhaustive_classes=()) for image in images]
    result, as_coco = coco_metrics(complete, LVIS), coco_metrics(complete)
    assert result["AR@300"] > 0
    assert result["AP"] == pytest.approx(as_coco["AP"])
    assert "AP rare" not in result
    assert coco_metrics(images, LVIS)["AP"] > result["AP"]
    with pytest.raises(GigamaskError, match="truth_classes"):
        coco_metrics([replace(images[0], truth_classes=None)], LVIS)
