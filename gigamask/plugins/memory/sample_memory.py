"""Memory of one sample: with dense masks (calculated), and as gigamask makes it (measured).

The peak is the largest RSS of a fresh process (VmHWM) while it makes the sample, above its imports.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from gigamask.data import annotation, process_memory
from gigamask.data.dataset import build_sample
from gigamask.data.image import encode_jpeg
from gigamask.data.loader import collate
from gigamask.data.process_memory import in_bytes
from gigamask.data.sample_config import SampleConfig
from gigamask.profiling.held_bytes import held_bytes
from gigamask.records import DataCursor, ImageAnnotation, SampleRef
from gigamask.types import Batch, RandomSpec, Sample

ANNOTATION_BYTES = 500
"""Bytes of JSON per mask, rounded: the figure usually given for SA-1B."""
GRIDS = (256, 1024)
SETTINGS = SampleConfig(image_size=1024, mask_size=GRIDS[0])
RANDOM_SPEC = RandomSpec(seed=0, clicks=12, blocks=12)
SAMPLE_REF = SampleRef(0, 0, 0)


def decoded(size: tuple[int, int], masks: int) -> dict[str, int]:
    """Return the bytes of a sample with dense masks at the original size.

    Args:
        size: Height and width of the image in pixels.
        masks: Number of masks.
    """
    pixels = size[0] * size[1]
    annotations = ANNOTATION_BYTES * masks
    return {
        "image_uint8": 3 * pixels,
        "masks_uint8": masks * pixels,
        "masks_float32": 4 * masks * pixels,
        "annotations": annotations,
        "total_uint8": (3 + masks) * pixels + annotations,
    }


def measure(jpg: bytes, json: bytes, name: str) -> dict[str, Any]:
    """Return the bytes of a sample, calculated with dense masks and measured.

    Args:
        jpg: The encoded image.
        json: Its annotations in SA-1B's format.
        name: The sample's name in errors and in the table.

    Returns:
        JSON-compatible data.

    Raises:
        CorruptSampleError: The sample cannot be used.
    """
    record = annotation.read(json, name)
    entry = annotation.check(record, name)
    runs = {
        grid: build_sample(
            jpg, entry, SAMPLE_REF, replace(SETTINGS, mask_size=grid), RANDOM_SPEC
        ).masks
        for grid in GRIDS
    }
    sample, batch = make_sample(jpg, json, name)
    return {
        "name": name,
        "height": entry.size[0],
        "width": entry.size[1],
        "masks": len(entry.masks),
        "masks_taken": len(sample.masks),
        "decoded": decoded(entry.size, len(entry.masks)),
        "measured": {
            "jpg": len(jpg),
            "json": len(json),
            "coco_text": coco_text_bytes(record, entry),
            "runs_original": held_bytes(entry.masks),
            **{f"runs_{grid}": held_bytes(masks) for grid, masks in runs.items()},
            "image_fitted": held_bytes(sample.image),
            "sample": held_bytes(sample),
            "batch_share": held_bytes(batch),
            "batch_share_masks": held_bytes((batch.rle_bounds, batch.rle_offsets)),
            "peak": peak(jpg, json, name),
        },
    }


def coco_text_bytes(record: annotation.Sa1bRecord, entry: ImageAnnotation) -> int:
    """Return the length of all masks' compressed COCO counts; plain lists are compressed first.

    Args:
        record: The JSON of the sample.
        entry: Its masks.
    """
    return sum(
        len(one.segmentation.counts)
        if isinstance(one.segmentation.counts, str)
        else len(entry.masks[number : number + 1].to_coco()[0])
        for number, one in enumerate(record.annotations)
    )


def make_sample(jpg: bytes, json: bytes, name: str) -> tuple[Sample, Batch]:
    """Return the sample and a batch of only this sample, as a loader process makes them.

    Args:
        jpg: The encoded image.
        json: Its annotations in SA-1B's format.
        name: The sample's name in errors.
    """
    sample = build_sample(jpg, annotation.parse(json, name), SAMPLE_REF, SETTINGS, RANDOM_SPEC)
    return sample, collate([sample], (), SETTINGS, RANDOM_SPEC, 0.5, DataCursor(1))


def peak(jpg: bytes, json: bytes, name: str) -> int:
    """Return how many bytes making the sample adds to the peak RSS of a fresh, warmed-up process.

    Args:
        jpg: The encoded image.
        json: Its annotations in SA-1B's format.
        name: The sample's name in errors.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        return fresh.submit(_peak_increase, jpg, json, name).result()


def _peak_increase(jpg: bytes, json: bytes, name: str) -> int:
    about, mask = {"image_id": 0, "width": 8, "height": 8}, {"size": (8, 8), "counts": [0, 64]}
    little = {
        "image": about,
        "annotations": [{"segmentation": mask, "predicted_iou": 1, "stability_score": 1}],
    }
    make_sample(
        encode_jpeg(np.zeros((8, 8, 3), np.uint8), 85, "444"), msgspec.json.encode(little), "little"
    )
    process_memory.reset_peak_rss()
    before = process_memory.rss_bytes()
    make_sample(jpg, json, name)
    return process_memory.peak_rss_bytes() - before


def table(found: dict[str, Any]) -> str:
    """Format the result of `measure` as plain text."""
    decoded, ours = found["decoded"], found["measured"]
    taken, side = found["masks_taken"], SETTINGS.image_size
    rows = [
        ("image, uint8", decoded["image_uint8"], ours["image_fitted"], f"fitted to {side}, uint8"),
        ("masks, uint8", decoded["masks_uint8"], ours["coco_text"], "as COCO's text"),
        (
            "masks, float32",
            decoded["masks_float32"],
            ours["runs_original"],
            "as runs of the original grid",
        ),
        ("", None, ours["runs_256"], f"{taken} of them as runs of a 256 grid"),
        ("", None, ours["runs_1024"], f"{taken} of them as runs of a 1024 grid"),
        ("annotations", decoded["annotations"], ours["json"], "the json"),
        (
            "in all, uint8",
            decoded["total_uint8"],
            ours["sample"],
            "the sample: image, runs of a 256 grid, boxes, its random numbers",
        ),
        (
            "",
            None,
            ours["batch_share"],
            f"its share of a batch, as sent by the worker (padded to {side} x {side})",
        ),
        ("", None, ours["batch_share_masks"], "  of which masks"),
        ("", None, ours["peak"], "peak while making it, above imports (VmHWM of a fresh process)"),
    ]
    lines = [
        f"{found['name']}: {found['height']} x {found['width']}, {found['masks']} masks",
        f"{'':16}{'decoded':>10}{'gigamask':>12}",
    ]
    lines += [
        f"{what:16}{'' if plain is None else in_bytes(plain):>10}{in_bytes(measured):>12}  {how}"
        for what, plain, measured, how in rows
    ]
    return "\n".join(
        [
            *lines,
            f"decoded, it would take {decoded['total_uint8'] / ours['batch_share']:.3g} times what"
            " the worker sends",
        ]
    )
