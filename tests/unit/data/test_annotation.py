"""Annotations as SA-1B writes them, and every way one does not hold together."""

import json

import pytest

from gigamask.data import annotation
from tests.errors import corrupt_sample

NAME = "a.tar:sa_1"


def test_masks_and_scores_are_read(record, masks):
    entry = annotation.parse(json.dumps(record(masks)).encode(), NAME)
    assert (entry.name, entry.size, len(entry.masks)) == (NAME, (24, 32), 3)
    assert (entry.masks.to_dense() == masks).all()
    assert entry.predicted_iou.tolist() == [0.5, pytest.approx(2 / 3), pytest.approx(5 / 6)]
    assert entry.stability_score.tolist() == [1, 1, 1]


def test_uncompressed_counts_are_read_too(record, masks):
    data = record(masks)
    data["annotations"][1]["segmentation"]["counts"] = [24 * 32 - 1, 1]
    assert (annotation.parse(json.dumps(data).encode(), NAME).masks.to_dense() == masks).all()


def test_an_image_may_have_no_masks(record, masks):
    """Also with a byte order mark, as programs of Windows begin their files with one."""
    entry = annotation.parse(json.dumps(record(masks[:0])).encode("utf-8-sig"), NAME)
    assert len(entry.masks) == len(entry.predicted_iou) == len(entry.stability_score) == 0


def change(path: str, value):
    def apply(data):
        *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in keys:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return apply


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("image", None, r"its json of \d+ bytes .*\(Object missing required field `image`\)"),
        ("annotations", None, "missing required field `annotations`"),
        (
            "annotations.1.predicted_iou",
            None,
            r"missing required field `predicted_iou` - at `\$.annotations\[1\]`",
        ),
        ("annotations.0.stability_score", "high", "Expected `float`, got `str`"),
        ("annotations.0.segmentation.counts", 5, "Expected `str | array`, got `int`"),
        ("annotations.0.segmentation.size", [24], "Expected `array` of length 2"),
        ("image.image_id", 2**63, "not an SA-1B annotation"),
        ("image.width", 0, "24 x 0 pixels, .*1 to 65535 .*134217728"),
        ("image.height", 65536, "65536 x 32 pixels"),
        ("image.height", -24, "-24 x 32 pixels"),
        ("image.height", 2**21 + 1, "2097153 x 32 pixels"),
        ("annotations.2.segmentation.size", [32, 24], "annotation 2 has 32 x 24 .*24 x 32"),
        ("annotations.1.segmentation.counts", "01", "mask 1: run lengths sum to 1, .*24 x 32"),
        ("annotations.1.segmentation.counts", [1, 2], "mask 1: run lengths sum to 3"),
        ("annotations.1.segmentation.counts", [700, -32, 100], "mask 1: run length -32"),
        (
            "annotations.1.segmentation.counts",
            [768, 10**30],
            "is not an SA-1B annotation|mask 1: run length",
        ),
        ("annotations.1.segmentation.counts", "P", "mask 1: the counts end within a number"),
        ("annotations.1.segmentation.counts", "é", "mask 1: byte 195 at"),
        ("annotations.1.segmentation.counts", "", "mask 1: run lengths sum to 0"),
        ("annotations.1.predicted_iou", 1e300, "annotation 1 has predicted_iou 1e[+]300"),
        ("annotations.2.stability_score", -1e39, "annotation 2 has stability_score -1e[+]39"),
    ],
)
def test_what_does_not_hold_together_is_named(record, masks, path, value, message):
    data = record(masks)
    change(path, value)(data)
    with corrupt_sample(f"^{NAME}: .*({message})"):
        annotation.parse(json.dumps(data).encode(), NAME)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"no json",
        b'{"image": NaN}',
        b"\xff\xfe",
        b"[]",
        b'{"image": {"image_id": 1, "width": 2, "height": 2, "file_name": "\xff"}}',
    ],
)
def test_what_is_no_json_is_named(raw):
    with corrupt_sample(rf"^{NAME}.*{len(raw)}"):
        annotation.parse(raw, NAME)


def test_caps(record, masks, monkeypatch):
    raw = json.dumps(record(masks)).encode()
    monkeypatch.setattr(annotation, "MAX_MASKS", 2)
    with corrupt_sample(rf"^{NAME}.*3.*2"):
        annotation.parse(raw, NAME)
    monkeypatch.setattr(annotation, "MAX_BYTES", 100)
    with corrupt_sample(rf"^{NAME}.*{len(raw)}.*100"):
        annotation.parse(raw, NAME)
