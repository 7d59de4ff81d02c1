"""Average precision and recall of masks whose scores are known by hand."""

import logging
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from gigamask.evaluation.coco_ap import CocoProtocol, ImageDetections, coco_metrics, table
from gigamask.masks.rle import RLEMasks
from tests.errors import error_line


def boxes(*corners: tuple[int, int, int, int]) -> RLEMasks:
    """Rectangles y0, y1, x0, x1 on a 50 x 50 grid."""
    masks = np.zeros((len(corners), 50, 50), bool)
    for mask, (y0, y1, x0, x1) in zip(masks, corners, strict=True):
        mask[y0:y1, x0:x1] = True
    return RLEMasks.from_dense(masks)


A, B, WRONG = (0, 10, 0, 10), (20, 30, 20, 30), (40, 50, 40, 50)


def test_all_found_is_one():
    result = coco_metrics([ImageDetections(boxes(A, B), boxes(B, A), np.array([0.2, 0.9]))])
    assert (result["AP"], result["AP75"], result["AR@1"], result["AR@10"], result["AP small"]) == (
        pytest.approx(1),
        pytest.approx(1),
        0.5,
        1,
        1,
    )
    assert result["AP large"] is None
    assert (result["images"], result["truth"], result["found"]) == (1, 2, 2)


def test_classes_are_distinguished_only_if_the_protocol_says_so():
    image = ImageDetections(
        boxes(A), boxes(A), np.ones(1), truth_classes=np.array([3]), detection_classes=np.array([4])
    )
    assert coco_metrics([image])["AP"] == 0
    assert coco_metrics([image], CocoProtocol(by_class=False))["AP"] == pytest.approx(1)
    with error_line("^pass both truth_classes and detection_classes"):
        coco_metrics([replace(image, detection_classes=None)])


def test_table_names_what_has_no_ground_truth():
    result = coco_metrics([ImageDetections(boxes(A), boxes(A), np.ones(1))])
    text = table(result)
    assert text.startswith("1 mask found, 1 to find, on 1 image\nAP               1.000\n")
    assert "AP large             -" in text


def test_nothing_is_printed(capfd, caplog):
    with caplog.at_level(logging.WARNING):
        coco_metrics([ImageDetections(boxes(A), boxes(A), np.ones(1))])
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


@pytest.mark.long
def test_pycocotools_is_not_loaded():
    code = (
        "import sys; import gigamask.evaluation.coco_ap; "
        "assert not any(name.startswith('pycocotools') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("most", [(), (0, 10), (10, 1), (10, 10)])
def test_counts_that_do_not_increase_are_refused(most):
    with error_line(r"max_found.*1"):
        CocoProtocol(most)


def test_masks_that_do_not_fit_are_refused():
    other = RLEMasks.from_dense(np.zeros((1, 4, 5), bool))
    with error_line(r"50, 50.*4, 5"):
        ImageDetections(boxes(A), other, np.ones(1))
    for name in ("scores", "crowd", "truth_classes", "detection_classes", "truth_areas"):
        values = {
            "scores": np.ones(1),
            name: np.ones(
                3, bool if name == "crowd" else int if name.endswith("classes") else float
            ),
        }
        with error_line(rf"3.*{name}.*1"):
            ImageDetections(boxes(A), boxes(A), **values)


@pytest.mark.parametrize("score", [np.nan, np.inf])
def test_scores_that_cannot_be_sorted_are_refused(score):
    with error_line(r"mask 1.*(nan|inf)"):
        ImageDetections(boxes(A), boxes(A, B), np.array([0.5, score]))
