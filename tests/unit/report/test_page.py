"""What of a run is on its page."""

from pathlib import Path

import pytest

from gigamask.report import page
from gigamask.report.history import History

BIN = {"low": 0.5, "high": 0.6, "predicted": 0.5, "actual": 0.25, "count": 3}
MEANS = {"clicks": {"1": 0.5}, "oracle": 0.75, "box": 0.25}
FULL = {
    **MEANS,
    "masks": 300,
    "images": 9,
    "granularity": {"fine": MEANS | {"masks": 2, "standard_error": MEANS}},
    "size": {},
    "calibration": {"expected_error": 0.25, "bias": 0.0, "correlation": 0.5, "bins": [BIN]},
    "data": ["a.tar"],
    "weights": "starter",
    "protocol": {"refine": True, "boundary": {"iou_dilation": 0.02}},
}


@pytest.mark.parametrize("missing, is_shown", [("standard_error", True), ("size", False)])
def test_scores_by_size_and_calibration_are_shown_if_they_are_complete(missing, is_shown):
    """Of 100 masks or more there is no standard error."""
    scores = FULL | {"standard_error": MEANS}
    del scores[missing]
    runs = {"a": History(Path("a"), {}, scores=scores)}
    best = {"step": 3, "scores": {"1 click": 0.5}, "standard_error": {"1 click": 0.125}, "of": ""}
    text = page.final_scores(runs, {"a": {"best": best}})
    assert ("By size" in text) == ("reliability" in page.chart_data(runs)) == is_shown
    assert "evaluation.json of starter" in text
    assert "300 masks on 9 images, boxes and first clicks refined" in text
    assert text.count("0.500 ± 0.500") == 1
    assert "0.500 ± 0.125" in text
    best = [best | {"subject": f"{name} on rows"} for name in ("any", "box")]
    reports = {name: {"best": each} for name, each in zip("ab", best, strict=True)}
    two = {"a": runs["a"], "b": runs["a"]}
    assert "different images" not in page.final_scores(two, reports)
    best[1]["subject"] = "any on others"
    assert "different images" in page.final_scores(two, reports)
