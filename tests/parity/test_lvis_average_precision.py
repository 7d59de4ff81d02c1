"""LVIS's average precision against pycocotools', changed where LVIS defines it otherwise.

The definition is that of the package lvis 0.5.3 (`LVISResults` and `LVISEval`): the best 300 masks
of an image over all classes; per class, only images where it was looked for; an unmatched mask is
ignored where not all objects of its class are annotated; masks without a pixel do not count.
"""

from dataclasses import replace

import numpy as np
import pytest

from gigamask.evaluation import coco_ap
from gigamask.evaluation.coco_ap import LVIS, ImageDetections, coco_metrics
from tests.errors import error_line
from tests.parity.test_average_precision import agree, judged, scene, statistics

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
FEW = replace(LVIS, max_found=(12,))
"""LVIS's statistics of the best 12 masks of an image, not 300."""


def drawn(image: ImageDetections) -> ImageDetections:
    """An image without the masks that have no pixel."""
    there, found = (masks.areas() > 0 for masks in (image.truth, image.detections))
    return chosen(
        replace(image, truth=image.truth[there], truth_classes=image.truth_classes[there]), found
    )


def chosen(image: ImageDetections, found: np.ndarray) -> ImageDetections:
    """An image with some of its predicted masks."""
    names = ("detections", "detection_classes", "scores")
    return replace(image, **{name: getattr(image, name)[found] for name in names})


def by_definition(images: list[ImageDetections]) -> dict[str, float | None]:
    counted = []
    for image in images:
        best = drawn(chosen(image, np.argsort(-image.scores, kind="stable")[: FEW.max_found[0]]))
        looked_for = [*best.truth_classes, *best.negative_classes]
        counted.append(chosen(best, np.isin(best.detection_classes, looked_for)))
    judge = judged(counted, FEW)
    for each in filter(None, judge.evalImgs):
        if each["category_id"] in images[each["image_id"]].not_exhaustive_classes:
            each["dtIgnore"] |= each["dtMatches"] == 0
    return statistics(judge, rare=[0], common=[1], frequent=[2, 3])


FREQUENCIES = {0: "r", 1: "c", 2: "f", 3: "f"}


def federated_scene(random: np.random.Generator, founds: int, levels: int) -> ImageDetections:
    """An image of which some classes are known to be absent, or not all annotated."""
    image = replace(scene(random, int(random.integers(0, 8)), founds, levels), crowd=None)
    absent, partial = (tuple(map(int, random.choice(4, 2, False))) for _ in range(2))
    return replace(image, negative_classes=absent, not_exhaustive_classes=partial)


@pytest.mark.parametrize("seed, pairs", [(0, 2**21), (1, 2**21), (2, 12)])
def test_random_images(seed, pairs, monkeypatch):
    """Classes are evaluated together, and one at a time."""
    monkeypatch.setattr(coco_ap, "PAIRS", pairs)
    random = np.random.default_rng(seed)
    images = [federated_scene(random, int(random.integers(0, 20)), 1000) for _ in range(10)]
    result = coco_metrics(images, FEW, FREQUENCIES)
    agree(result, by_definition(images))
    assert result["AP"] != coco_metrics(images)["AP"]


def test_what_federation_changes():
    """If every class was looked for, masks score as in COCO, but for those without a pixel."""
    random = np.random.default_rng(3)
    everywhere, images = (0, 1, 2, 3), []
    for _ in range(8):
        image = drawn(federated_scene(random, 9, 1000))
        images.append(replace(image, negative_classes=everywhere))
    complete = [replace(image, not_exhaustive_classes=()) for image in images]
    result, as_coco = coco_metrics(complete, LVIS), coco_metrics(complete)
    assert result["AR@300"] > 0
    assert result["AP"] == pytest.approx(as_coco["AP"])
    assert "AP rare" not in result
    assert coco_metrics(images, LVIS)["AP"] > result["AP"]
    with error_line("truth_classes"):
        coco_metrics([replace(images[0], truth_classes=None)], LVIS)
