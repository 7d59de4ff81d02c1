"""The index says of any tar what tarfile, json and pycocotools say of it, and the same of many tars
however they were indexed.
"""

import json
import os
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco

from gigamask.data import tar
from gigamask.data.index import build, extend
from gigamask.data.shards import ShardReader
from tests import broken
from tests.errors import error_line

STRAY = ["readme", "a.txt", "._set-1.jpg"]


@st.composite
def archives(draw):
    """Members of one tar: images of any small size with or without a json, stray files, in any
    order, each in any folder."""
    members = []
    for number in draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=5, unique=True)):
        height, width = draw(st.integers(1, 20)), draw(st.integers(1, 20))
        pixels = np.zeros((height, width, 3), np.uint8)
        record, random = None, np.random.default_rng(number)
        if draw(st.booleans()):
            masks = []
            for density in draw(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), max_size=4)):
                mask = np.asfortranarray(random.random((height, width)) < density, np.uint8)
                counts = coco.encode(mask)["counts"].decode()
                masks.append((counts, round(random.random(), 3), random.integers(2).item()))
            record = broken.described(number, (height, width), masks)
            record["image"] |= {"image_id": number + draw(st.integers(0, 1)), "file_name": ""}
        stem = draw(st.sampled_from([f"set-{number:010}", f"{number}x"]))
        suffix = draw(st.sampled_from([".jpg", ".JPG", ".jpeg"]))
        members.append((stem + suffix, simplejpeg.encode_jpeg(pixels)))
        if record:
            members.append((f"{stem}.json", json.dumps(record).encode()))
    members += [
        (f"{name}.json", b"{}") for name in draw(st.sets(st.sampled_from(["left", "over"])))
    ]
    members += [(name, b"text") for name in draw(st.sets(st.sampled_from(STRAY)))]
    prefixes = st.sampled_from(["", "./", "images/", "a/b/"])
    return [(draw(prefixes) + name, payload) for name, payload in draw(st.permutations(members))]


@pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # pycocotools against numpy 2
@settings(deadline=None, max_examples=40)
@given(archives())
def test_rows_are_what_the_plain_way_finds(members):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.tar"
        tar.write(path, members)
        index = build(path, Path(folder) / "index")
        with tarfile.open(path) as archive:
            stored = {
                os.path.basename(member.name): archive.extractfile(member).read()
                for member in archive
            }
        jpgs = {
            Path(name).stem: data
            for name, data in stored.items()
            if name.lower().endswith(("jpg", "jpeg")) and name not in STRAY
        }
        stems = list(jpgs)
        assert [name.decode() for name in index.images["name"]] == stems
        shards, mask_count = ShardReader(index.shard_paths), 0
        for row, stem in enumerate(stems):
            assert index.find(index.entry_name(row)) == row
            raw = stored.get(f"{stem}.json")
            assert shards.read_entry(index, row) == (jpgs[stem], raw)
            height, width, *_ = simplejpeg.decode_jpeg_header(jpgs[stem])
            assert (index.images["height"][row], index.images["width"][row]) == (height, width)
            plain = {"image": {"image_id": -1 if "x" in stem else int(stem[4:])}, "annotations": []}
            record = json.loads(raw) if raw else plain
            annotations = record["annotations"]
            assert index.images["image_id"][row] == record["image"]["image_id"]
            rows = index.mask_rows(row)
            assert (rows.start, rows.stop) == (
                mask_count,
                mask_count := mask_count + len(annotations),
            )
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
        assert report["without_json"] == sum(f"{stem}.json" not in stored for stem in stems)
        assert report["other_members"] == sum(name in stored for name in STRAY)


@pytest.fixture(scope="module")
def six(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """A folder of six tars of random length, names and masks, and the files of their index."""
    folder = tmp_path_factory.mktemp("six")
    random = np.random.default_rng(3)
    for tar_number in range(6):
        members = [("readme", b"text")] * bool(random.integers(2))
        for number in range(10**tar_number, 10**tar_number + random.integers(1, 4)):
            cuts = random.integers(0, 49, random.integers(0, 5)).tolist()
            masks = [([cut, 48 - cut], cut / 48, 1.0) for cut in cuts]
            jpg = simplejpeg.encode_jpeg(np.zeros((6, 8, 3), np.uint8))
            members += broken.members(number, jpg, broken.described(number, (6, 8), masks))
        tar.write(folder / "tars" / f"{tar_number}.tar", members)
    return folder / "tars", _files(build(folder / "tars", folder / "whole").folder)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_parts_in_any_order_make_the_same_index(six, data):
    """Tars are assigned to parts, which may overlap; the parts are joined in any order, some in two
    stages."""
    tars, whole = six
    paths = sorted(map(str, tars.iterdir()))
    with TemporaryDirectory() as folder:
        owners = [data.draw(st.integers(0, 3)) for _ in paths]
        dealt = [
            [path for path, owner in zip(paths, owners, strict=True) if owner == part]
            for part in range(4)
        ]
        extra = data.draw(st.lists(st.sampled_from(paths), max_size=2))
        parts = [
            build(data.draw(st.permutations(held)), Path(folder) / str(part)).folder
            for part, held in enumerate([*dealt, extra])
            if held
        ]
        parts = data.draw(st.permutations(parts))
        if data.draw(st.booleans()):
            parts = [build(parts[:2], Path(folder) / "first two").folder, *parts[2:]]
        joined = extend(parts, Path(folder) / "joined")
        assert joined.scanned == 0
        assert _files(joined.index.folder) == whole


@settings(deadline=None, max_examples=60)
@example(0, b"\x80", 154)  # what ends the checksum
@example(0, b"  x", 153 + 1)
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
            with error_line(r"a.tar: "):
                tar.scan(path)
