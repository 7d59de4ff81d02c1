"""What a sample costs, decoded and measured."""

import json

import pytest

from gigamask.data import annotation, process_memory
from gigamask.data.loader import collate
from gigamask.data.process_memory import in_bytes
from gigamask.errors import CorruptSampleError
from gigamask.plugins.memory import large_sample, sample_memory
from gigamask.records import DataCursor


def test_decoded_figures_are_sa1bs():
    found = sample_memory.decoded((1500, 2250), 100)
    shown = [
        in_bytes(found[name])
        for name in ("image_uint8", "masks_uint8", "masks_float32", "annotations", "total_uint8")
    ]
    assert shown == ["10.1 MB", "337.5 MB", "1.35 GB", "50.0 KB", "347.7 MB"]


@pytest.mark.slow
@pytest.mark.skipif(not process_memory.PROC.is_dir(), reason="this system has no /proc")
def test_what_is_measured_is_what_is_held():
    jpg, raw = large_sample.make((600, 900), 80)
    found = sample_memory.measure(jpg, raw, "specimen")
    assert (found["height"], found["width"], found["masks"]) == (600, 900, 80)
    assert 0 < found["masks_taken"] <= 64
    ours, texts = (
        found["measured"],
        [each["segmentation"]["counts"] for each in json.loads(raw)["annotations"]],
    )
    assert (ours["jpg"], ours["json"], ours["coco_text"]) == (
        len(jpg),
        len(raw),
        sum(map(len, texts)),
    )
    masks = annotation.parse(raw, "specimen").masks
    assert ours["runs_original"] == masks.bounds.nbytes + masks.offsets.nbytes
    assert ours["runs_256"] < ours["runs_1024"] < 2**16
    assert ours["image_fitted"] == 3 * 683 * 1024
    made, batch = sample_memory.make_sample(jpg, raw, "specimen")
    assert (
        ours["runs_256"]
        == made.masks.bounds.nbytes + made.masks.offsets.nbytes
        == ours["batch_share_masks"]
    )
    assert ours["batch_share"] - ours["sample"] == pytest.approx(3 * (1024 - 683) * 1024, abs=2000)
    assert batch.cursor == DataCursor(1)
    assert ours["batch_share"] == sum(
        value.nbytes for value in vars(batch).values() if hasattr(value, "nbytes")
    ) + sample_memory.held_bytes(batch.random_inputs)
    # Decoded pixels, and not much more than what is made of them.
    assert 3 * 600 * 900 < ours["peak"] < 40e6
    lines = sample_memory.table(found).splitlines()
    assert lines[0] == "specimen: 600 x 900, 80 masks"
    assert lines[2].split()[:6] == ["image,", "uint8", "1.6", "MB", "2.1", "MB"]
    assert lines[-1].startswith("decoded, it would take ")
    assert max(map(len, lines)) < 120


def test_plain_counts_are_measured_as_the_text_they_would_be():
    annotations = [
        {
            "segmentation": {"size": (8, 8), "counts": [3, 5, 56]},
            "predicted_iou": 1,
            "stability_score": 1,
        }
    ]
    raw = json.dumps(
        {"image": {"image_id": 0, "width": 8, "height": 8}, "annotations": annotations}
    ).encode()
    text = annotation.parse(raw, "x").masks.to_coco()[0]
    assert sample_memory.coco_text_bytes(
        annotation.read(raw, "x"), annotation.parse(raw, "x")
    ) == len(text)


def test_a_broken_sample_is_named():
    jpg, raw = large_sample.make((60, 90), 3)
    with pytest.raises(
        CorruptSampleError, match=r"^specimen: the JPEG of \d+ bytes cannot be decoded"
    ):
        sample_memory.measure(jpg[:-50], raw, "specimen")


def test_empty_is_nothing():
    assert sample_memory.held_bytes(("text", None, 3, [b"ab"])) == 2
    assert (
        sample_memory.held_bytes(
            collate(
                [], (), sample_memory.SETTINGS, sample_memory.RANDOM_SPEC, 0.5, DataCursor(0)
            ).images
        )
        == 0
    )
    assert [in_bytes(count) for count in (0, 999, 1000, 1e9, 2.5e12)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "1.00 GB",
        "2500.00 GB",
    ]
