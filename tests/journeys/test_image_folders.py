"""A folder of photographs from the command line: indexed, described, and refused with one line
where masks or tars are needed.
"""

import json

import numpy as np
import pytest
import simplejpeg

from tests.commands import invoke, refusal


@pytest.fixture
def photos(tmp_path):
    generator = np.random.default_rng(0)
    for number in range(6):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            simplejpeg.encode_jpeg(generator.integers(0, 256, (30, 40 + number, 3), np.uint8))
        )
    return tmp_path / "photos"


def test_a_folder_of_images_is_indexed_and_described(photos, tmp_path, capsys):
    invoke(f"index {photos} --out {tmp_path}/index --json {tmp_path}/index.json")
    report = json.loads((tmp_path / "index.json").read_text())
    counts = {"images": 6, "masks": 0, "shards": 2, "without_json": 6, "scanned": 2}
    assert counts.items() <= report.items()
    for path in photos, tmp_path / "index":
        invoke(f"stats {path} --picture {tmp_path}/stats.png")
    assert "6" in capsys.readouterr().out


def test_nothing_is_written_among_images(photos, tmp_path, capsys):
    (photos / "class0" / "0.json").write_text("{}")
    invoke(f"index {photos} --out {tmp_path}/index")
    assert f"pack it: tar cf shard.tar -C {photos}/class0 ." in capsys.readouterr().out
    shards, before = tmp_path / "shards", sorted(photos.rglob("*"))
    invoke(f"synth {shards} --images 1")
    folder, mae = photos / "class0", "pretrain mae_tiny --steps 1"
    for words, told in {
        f"index {shards} --out {folder}": "is not an index, but holds 0.JPEG and 3 more",
        f"masks {shards} --out {folder}": "is not a mask store",
        f"masks {shards} --out {tmp_path}/index": "in a folder of its own",
        f"masks {photos} --out {tmp_path}/masks": "has no masks",
        f"synth {folder}": "is not a folder of tars",
        f"segment starter {shards} --out {folder} --to shards": "is not a folder of tars",
        f"segment starter {folder} --out {folder} --to shards": "is in",
        f"demo --out {folder}": "is not a run folder",
        f"train tiny --data {shards} --out {folder}": "is not a run folder, but holds 0.JPEG and 3",
        f"{mae} --data {photos} --out {photos}": "is a folder that the training reads",
    }.items():
        assert told in refusal(capsys, words)
    assert sorted(photos.rglob("*")) == before
    logs = tmp_path / "run"
    logs.mkdir()
    (logs / "log.txt").touch()
    invoke(f"{mae} --batch-size 1 --data {photos} --out {logs}")


def test_what_needs_tars_or_masks_says_so_in_one_line(photos, tmp_path, capsys):
    for words, told in {
        f"verify {photos}": f"tar cf shard.tar -C {photos}/class0 .",
        f"train tiny --data {photos} --out {tmp_path}/run": "is a folder of images where tars are",
        f"index {photos}/class0/0.JPEG --out {tmp_path}/index": "0.JPEG: is an image",
    }.items():
        assert told in refusal(capsys, words)
