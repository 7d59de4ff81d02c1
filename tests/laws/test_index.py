"""The index says of any tar what tarfile, json and pycocotools say of it."""

import json
import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco

from gigamask.data import tar
from gigamask.data.index import build
from gigamask.data.shards import Shards
from gigamask.faults import Fault


@st.composite
def archives(draw):
    """Members of one tar: images of any small size with or without a json, stray files, in any order and any folder."""
    members = []
    for number in draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=5, unique=True)):
        height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        pixels = np.zeros((height, width, 3), np.uint8)
        members.append((f"sa_{number}.jpg", simplejpeg.encode_jpeg(pixels)))
        if draw(st.booleans()):
            random = np.random.default_rng(number)
            annotations = []
            for density in draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), max_size=4)):
                encoded = coco.encode(np.asfortranarray(random.random((height, width)) < density).astype(np.uint8, order="F"))
                scores = {"predicted_iou": round(random.random(), 3), "stability_score": random.integers(2).item()}
                annotations.append({"segmentation": {"size": [height, width], "counts": encoded["counts"].decode()}, **scores})
            image = {"image_id": number, "width": width, "height": height, "file_name": f"sa_{number}.jpg"}
            members.append((f"sa_{number}.json", json.dumps({"annotations": annotations, "image": image}).encode()))
    members += [(f"{name}.json", b"{}") for name in draw(st.sets(st.sampled_from(["left", "over"])))]
    members += [(name, b"text") for name in draw(st.sets(st.sampled_from(["readme", "a.txt"])))]
    prefix = draw(st.sampled_from(["", "./", "images/", "a/b/"]))
    return [(prefix + name, payload) for name, payload in draw(st.permutations(members))]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools against numpy 2
@settings(deadline=None, max_examples=40)
@given(archives())
def test_rows_are_what_the_plain_way_finds(members):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        tar.write(path, members)
        index = build(path, Path(folder) / "index")
        with tarfile.open(path) as archive:
            stored = {os.path.basename(member.name): archive.extractfile(member).read() for member in archive}
        stems = [name[:-4] for name in stored if name.endswith(".jpg")]
        assert [name.decode() for name in index.images["name"]] == stems
        shards, mask_count = Shards(index.shard_paths), 0
        for row, stem in enumerate(stems):
            assert index.find(index.entry_name(row)) == row
            assert shards.read_entry(index, row) == (stored[f"{stem}.jpg"], stored.get(f"{stem}.json"))
            height, width, *_ = simplejpeg.decode_jpeg_header(stored[f"{stem}.jpg"])
            assert (index.images["height"][row], index.images["width"][row]) == (height, width)
            assert index.images["image_id"][row] == int(stem[3:])
            annotations = json.loads(stored.get(f"{stem}.json", b'{"annotations": []}'))["annotations"]
            rows = index.mask_rows(row)
            assert (rows.start, rows.stop) == (mask_count, mask_count := mask_count + len(annotations))
            assert index.images["masks"][row] == len(annotations)
            for mask, annotation in zip(range(rows.start, rows.stop), annotations, strict=True):
                dense = coco.decode(annotation["segmentation"]).astype(bool)
                assert index.masks["area"][mask] == dense.sum()
                ys, xs = np.nonzero(dense)
                box = [xs.min(), ys.min(), xs.max(), ys.max()] if dense.any() else [1, 1, 0, 0]
                assert index.masks["box"][mask].tolist() == box
                assert index.masks["predicted_iou"][mask] == np.float32(annotation["predicted_iou"])
                assert index.masks["stability_score"][mask] == annotation["stability_score"]
        report = index.report()
        assert report["masks"] == mask_count
        assert report["without_jpg"] == sum(name in stored for name in ("left.json", "over.json"))
        assert report["other_members"] == sum(name in stored for name in ("readme", "a.txt"))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4), st.binary(min_size=1, max_size=40), st.integers(0, 511))
def test_a_damaged_header_is_refused(which, damage, at):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        tar.write(path, [(f"m{number}", bytes(100 * number)) for number in range(5)])
        whole = path.read_bytes()
        start = tar.scan(path).offsets[which] - 512 + at
        end = min(start + len(damage), start - at + 512)
        changed = whole[:start] + damage[: end - start] + whole[end:]
        path.write_bytes(changed)
        header = changed[start - at : start - at + 512]
        try:
            tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            with pytest.raises(Fault, match=r"a.tar: "):
                tar.scan(path)
