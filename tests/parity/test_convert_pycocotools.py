"""Converted masks against pycocotools' own, from random annotations and from COCO's."""

import io
import json
import tarfile
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco

from gigamask.data import annotation
from gigamask.data import index as indexes
from gigamask.data.shards import ShardReader
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.datatools.convert_coco import CocoImage
from gigamask.datatools.outlines import _measured

# pycocotools 2.0 decodes through an old array protocol, which numpy 2 warns about.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def polygon(random: np.random.Generator, height: int, width: int) -> list[float]:
    """One ring: within the image, tiny, reaching out of it, on whole numbers, all in one point, on
    a line, or far outside."""
    corners = int(random.integers(3, 25))
    centre = random.uniform(0, [width, height], (1, 2))
    kind = int(random.integers(7))
    ring = [
        lambda: random.uniform(0, [width, height], (corners, 2)),
        lambda: centre + random.normal(0, 0.6, (corners, 2)),
        lambda: centre + random.normal(0, [width, height], (corners, 2)),
        lambda: np.round(centre + random.normal(0, 20, (corners, 2))),
        lambda: np.repeat(centre, corners, 0),
        lambda: centre + np.linspace(-9, 9, corners)[:, None] * random.normal(0, 1, (1, 2)),
        lambda: centre + random.normal(0, 4000, (corners, 2)),
    ][kind]()
    return ring.ravel().tolist()


def segmentation(random: np.random.Generator, height: int, width: int) -> list | dict:
    """Rings, or run lengths in either form."""
    form = random.random()
    if form < 0.6:
        return [polygon(random, height, width) for _ in range(random.integers(1, 4))]
    pixels = random.random((height, width)) < random.uniform(0.02, 0.9)
    if form < 0.8:
        told = coco.encode(np.asfortranarray(pixels.astype(np.uint8)))
        return {"size": [height, width], "counts": told["counts"].decode()}
    flat = np.concatenate([[False], pixels.T.ravel(), [not pixels[-1, -1]]])
    return {
        "size": [height, width],
        "counts": np.diff(np.flatnonzero(flat[1:] != flat[:-1]), prepend=0).tolist(),
    }


def as_coco_does(segmentation: list | dict, height: int, width: int) -> np.ndarray:
    """The mask as `COCO.annToMask` makes it, without the rings that are no area."""
    if isinstance(segmentation, list):
        segmentation = [ring for ring in segmentation if not isinstance(_measured(0, ring), str)]
        if not segmentation:
            return np.zeros((height, width), bool)
        return coco.decode(coco.merge(coco.frPyObjects(segmentation, height, width))).astype(bool)
    if isinstance(segmentation["counts"], list):
        segmentation = coco.frPyObjects(segmentation, height, width)
    return coco.decode(segmentation).astype(bool)


def test_a_thousand_annotations():
    random = np.random.default_rng(5)
    every, images, empty = [], [], 0
    for _ in range(40):
        height, width = map(int, random.integers(1, 120, 2))
        given = [segmentation(random, height, width) for _ in range(25)]
        expected = [as_coco_does(each, height, width) for each in given]
        raws = [
            msgspec.Raw(json.dumps({"segmentation": each, "id": i, "image_id": 1}).encode())
            for i, each in enumerate(given)
        ]
        every.append(expected)
        images.append((CocoImage(1, "", Path(), (height, width), raws, False), b""))
    groups = list(CocoImage.all_objects(images))
    assert len(groups) < 20
    for (*_, objects), expected in zip(chain(*groups), every, strict=True):
        filled = [i for i, mask in enumerate(expected) if mask.any()]
        assert [extra["id"] for extra in objects.extras] == filled
        assert np.array_equal(
            objects.masks.to_dense(),
            np.array([expected[i] for i in filled]).reshape(-1, *expected[0].shape),
        )
        assert len(objects.skipped) == 25 - len(filled)
        empty += len(objects.skipped)
    assert empty > 20


def check(folder, expected: dict[int, list[np.ndarray]]) -> None:
    """Compares the masks that the index finds under a folder with those expected of
    each image id."""
    index = indexes.build(folder, folder / "index")
    shards = ShardReader(index.shard_paths)
    assert index.images["image_id"].tolist() == list(expected)
    for row, masks in enumerate(expected.values()):
        entry = annotation.parse(shards.read_entry(index, row)[1], "x")
        assert len(entry.masks) == len(masks) == index.images["masks"][row]
        assert all(
            np.array_equal(found, mask)
            for found, mask in zip(entry.masks.to_dense(), masks, strict=True)
        )


def test_a_file_through_shards_and_index(tmp_path):
    random = np.random.default_rng(8)
    images, annotations, expected = [], [], {}
    (tmp_path / "pictures").mkdir()
    for number in (12, 7, 100):
        height, width = map(int, random.integers(40, 90, 2))
        images.append(
            {"id": number, "file_name": f"{number}.png", "height": height, "width": width}
        )
        Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(
            tmp_path / "pictures" / f"{number}.png"
        )
        given = [segmentation(random, height, width) for _ in range(9)]
        annotations += [
            {"id": len(annotations) + i, "image_id": number, "segmentation": each}
            for i, each in enumerate(given)
        ]
        expected[number] = [
            mask for mask in (as_coco_does(each, height, width) for each in given) if mask.any()
        ]
    (tmp_path / "instances.json").write_text(
        json.dumps({"images": images, "annotations": annotations})
    )
    convert(
        tmp_path / "instances.json",
        tmp_path / "pictures",
        tmp_path / "out",
        ConvertOptions(),
        shard_images=2,
    )
    check(tmp_path / "out", expected)


@pytest.mark.long
def test_coco128(real_data, tmp_path):
    """Polygons and crowds of COCO itself, on its photographs."""
    source = real_data / "coco128"
    told = json.loads((source / "instances.json").read_text())
    pictures = {}
    for path in sorted(source.glob("*.tar")):
        with tarfile.open(path) as archive:
            pictures |= {
                int(member.name[3:-4]): archive.extractfile(member).read()
                for member in archive
                if member.name.endswith(".jpg")
            }
    told["images"] = [image for image in told["images"] if image["id"] in pictures]
    for image in told["images"]:
        (tmp_path / image["file_name"]).write_bytes(pictures[image["id"]])
        with Image.open(io.BytesIO(pictures[image["id"]])) as picture:
            assert picture.size == (image["width"], image["height"])
    masks: dict[int, list] = {image["id"]: [] for image in told["images"]}
    sizes = {image["id"]: (image["height"], image["width"]) for image in told["images"]}
    for each in told["annotations"]:
        masks[each["image_id"]].append(as_coco_does(each["segmentation"], *sizes[each["image_id"]]))
    done = convert(
        source / "instances.json", tmp_path, tmp_path / "out", ConvertOptions(keep_crowds=True)
    )
    assert (done["images"], done["masks"], done["skipped_masks"]) == (
        len(masks),
        sum(map(len, masks.values())),
        [],
    )
    check(tmp_path / "out", masks)
