"""Boxes against the plain way, and what equal scores, equal boxes and thresholds do."""

import numpy as np
import pytest

from gigamask.masks.boxes import box_area, box_iou, is_box_near_crop_edge, nms


def plain_nms(boxes, scores, threshold):
    """The textbook's two loops."""
    order = sorted(range(len(boxes)), key=lambda i: (-scores[i], i))
    kept = []
    for i in order:
        if all(float(box_iou(boxes[i : i + 1], boxes[j : j + 1])[0, 0]) <= threshold for j in kept):
            kept.append(i)
    return kept


def test_iou_counts_the_shared_part():
    boxes = np.array([[0.0, 0, 4, 4], [2, 2, 6, 6], [10, 10, 12, 12], [3, 3, 3, 3]])
    assert box_area(boxes).tolist() == [16, 16, 4, 0]
    found = box_iou(boxes, boxes)
    assert found[0].tolist() == pytest.approx([1, 4 / 28, 0, 0])
    assert found[3, 3] == 0
    assert box_iou(boxes[:0], boxes).shape == (0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_suppress_is_the_textbooks(threshold):
    chance = np.random.default_rng(0)
    corner = chance.integers(0, 30, (80, 2))
    boxes = np.concatenate([corner, corner + chance.integers(0, 20, (80, 2))], 1)
    scores = chance.integers(0, 6, 80).astype(np.float32)  # many are equal
    assert nms(boxes, scores, threshold).tolist() == plain_nms(boxes, scores, threshold)


def test_the_first_of_equals_wins_and_the_threshold_itself_stays():
    boxes = np.array([[0.0, 0, 10, 10], [0, 0, 10, 10], [0, 0, 10, 5]])
    assert nms(boxes, np.array([0.5, 0.5, 0.5]), 0.5).tolist() == [0, 2]
    assert nms(boxes, np.array([0.5, 0.6, 0.5]), 0.49).tolist() == [1]
    # 0.6 is nearer to a float32 above it: this IoU is that one, and falls.
    assert nms(np.array([[0.0, 0, 10, 10], [0, 0, 10, 6]]), np.array([1.0, 0.0]), 0.6).tolist() == [
        0
    ]
    assert nms(boxes[:0], np.zeros(0), 0.5).tolist() == []


def test_boxes_that_do_not_meet_are_not_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "gigamask.masks.boxes.box_iou",
        lambda a, b: compared.append(len(b)) or box_iou(a, b),
    )
    corners = np.stack(np.mgrid[:20, :20], -1).reshape(-1, 2) * 10
    boxes = np.concatenate([corners, corners + 9], 1).repeat(2, 0)
    assert nms(boxes, np.ones(800), 0.5).tolist() == list(range(0, 800, 2))
    assert sum(compared) == 400


def test_boxes_without_area_stay():
    assert nms(np.array([[3, 3, 3, 3], [3, 3, 3, 3]]), np.ones(2), 0.5).tolist() == [0, 1]


def test_near_an_edge_of_the_crop_but_not_of_the_image():
    boxes = np.array(
        [[40, 40, 60, 60], [15, 40, 60, 60], [40, 0, 60, 60], [40, 40, 81, 60], [40, 40, 60, 199]]
    )
    assert is_box_near_crop_edge(boxes, (0, 0, 100, 200), (200, 200), 20.0).tolist() == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert is_box_near_crop_edge(boxes, (10, 10, 100, 200), (200, 200), 5.0).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]
