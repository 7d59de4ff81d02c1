"""`gigamask segment` as a user types it: JSON files, tars, images of masks, and errors."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask.data import annotation
from gigamask.serialization import read_json
from gigamask.synthetic.scenes import compose_scene
from gigamask.workflows.segment import draw_masks
from tests import little
from tests.commands import invoke, refusal

SPEC = replace(little.SPEC, custom_init=True)

FEW = "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """A file of random weights of 64 px."""
    return little.save_little(tmp_path_factory.mktemp("weights"), SPEC)


@pytest.fixture
def pictures(tmp_path) -> Path:
    """A folder with a JPEG, a PNG and, in a folder of its own, another of the same name."""
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    for number, name in enumerate(["one.jpg", "two.png", "deep/one.jpg"]):
        cv2.imwrite(str(folder / name), compose_scene(1, number).pixels[::4, ::4, ::-1])
    return folder


def test_tars_are_segmented_into_tars_that_index_reads(weights, scenes, tmp_path, capsys):
    out, told = tmp_path / "out", tmp_path / "told.json"
    segment = f"segment {weights} {scenes} --out {out} --to-shards --shard-images 8 {FEW}"
    words = f"{segment} --json {told}"
    invoke(words)
    done, printed = read_json(told), capsys.readouterr().out
    assert (done["images"], done["existing"], len(done["tars"]), done["skipped"]) == (12, 0, 2, [])
    assert f"{out}: 12 images with {done['masks']} masks" in printed
    assert f"gigamask index {out}" in printed
    entry = annotation.parse((out / "sa_000000" / "sa_3.json").read_bytes(), "sa_3")
    assert len(entry.masks) > 3
    invoke(f"index {out} --out {tmp_path}/index --json {tmp_path}/index.json")
    report = read_json(tmp_path / "index.json")
    assert (report["images"], report["masks"], report["skipped"]) == (12, done["masks"], [])
    invoke(f"verify {out}")
    stamps = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".json", ".tar")
    }
    invoke(words)
    again = read_json(told)
    assert (again["existing"], again["existing_tars"], again["masks"]) == (12, 2, done["masks"])
    (out / "sa_000000" / "sa_3.json").write_text("{")  # damaged: done again, and its tar with it
    (out / "sa_000001.tar").unlink()
    before = (out / "sa_000000.tar").read_bytes()
    invoke(words)
    again = read_json(told)
    assert (again["existing"], again["existing_tars"]) == (11, 0)
    assert (out / "sa_000000.tar").read_bytes() == before
    assert {path for path, stamp in stamps.items() if path.stat().st_mtime_ns == stamp} == {
        path for path in stamps if path.suffix == ".json" and path.name != "sa_3.json"
    }


def test_pictures_globs_and_an_index_give_jsons_and_pictures(
    weights, pictures, scenes, tmp_path, capsys
):
    out, drawn = tmp_path / "out", tmp_path / "drawn"
    words = f"segment {weights} {pictures} --out {out} {FEW}"
    invoke(words, f"--cache {tmp_path}/cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3
    assert sorted(
        str(path.relative_to(out))
        for path in out.rglob("[a-z]*.json")
        if ".segment" not in str(path)
    ) == ["deep/one.json", "one.json", "two.json"]
    told = read_json(out / "two.json")
    assert told["image"]["file_name"] == "two.png"
    names = "id area bbox segmentation predicted_iou stability_score point_coords crop_box"
    assert {*names.split()} == told["annotations"][0].keys()
    invoke(words, f"--pictures {drawn}")  # of images that were done before, too
    assert "(3 done before)" in capsys.readouterr().out
    assert (
        cv2.imread(str(drawn / "deep" / "one.png")).shape
        == cv2.imread(str(pictures / "deep" / "one.jpg")).shape
    )
    invoke(f"segment {weights} {pictures} --out {tmp_path}/half --precision bf16", FEW)
    invoke(f"segment {weights} {pictures}/*.*g --out {tmp_path}/glob --to shards", FEW)
    written = sorted(path.name for path in (tmp_path / "glob").iterdir() if path.is_file())
    assert written == ["one.json", "sa_000000.tar", "two.json"]
    both = f"segment {weights} {pictures}/*.*g {pictures}/deep --out {tmp_path}/both"
    assert "one.json" in refusal(capsys, both, FEW)
    invoke(f"index {pictures}/deep --out {tmp_path}/index")
    invoke(f"segment {weights} {tmp_path}/index {pictures}/two.png --out {tmp_path}/mixed", FEW)
    assert (tmp_path / "mixed" / "deep" / "one.json").exists()


def test_bad_images_are_left_out_and_named(weights, pictures, tmp_path, capsys):
    raw = (pictures / "one.jpg").read_bytes()
    (pictures / "cut.jpg").write_bytes(raw[: len(raw) // 2])
    (pictures / "no.png").write_text("no picture")
    words = f"segment {weights} {pictures} --out {tmp_path}/out --to shards {FEW}"
    invoke(words)
    printed = capsys.readouterr().out
    assert "3 images with" in printed
    assert "images skipped: 2" in printed
    assert "cut.jpg" in printed
    assert "no.png" in printed
    # Mended: done by the same command, and put into the tar.
    (pictures / "cut.jpg").write_bytes(raw)
    invoke(words)
    said = capsys.readouterr().out
    assert "(3 done before)\n  kept masks with a predicted IoU above 0." in said
    assert "\n  1 tar (0 done before)" in said
    none = refusal(capsys, f"segment {weights} {pictures}/no.png --out {tmp_path}/none")
    assert "none of 1 images" in none


def test_invalid_input_is_a_one_line_error(weights, pictures, tmp_path, capsys):
    out, other = f"--out {tmp_path}/out", little.save_little(tmp_path, SPEC, 1)
    held = f"{weights} {pictures} {out}"
    invoke(f"segment {held} {FEW}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sa_1.tar").write_text("mine")
    annotations = tmp_path / "coco.json"
    annotations.write_text('{"images": [], "annotations": []}')
    for words, message in {
        f"{held} {FEW} --table {annotations}": "would replace annotations by results",
        f"{weights} {out}": "image",
        out: "missing weights",
        f"{held} --to-shards --shard-images 0": "--shard-images must be at least 1 (got 0)",
        f"{held} --cache c --cache-gb 0": "0 bytes",
        held: "holds results of other weights or settings",
        f"{held} {FEW} --precision bf16": "holds results of other weights or settings",
        f"{other} {pictures} {out} {FEW}": "holds results of other weights or settings",
        f"{weights} {pictures} --out {tmp_path}/full": "1 other tars, such as sa_1.tar",
        f"{weights} {pictures} --out {pictures}/new --to labels": "new: is in",
        f"{weights} {pictures} {out} --pictures {pictures}/seen": "seen: is in",
    }.items():
        assert message in refusal(capsys, "segment", words, "--progress none").lower(), words


def test_drawn_masks_are_seen():
    scene = compose_scene(1, 0)
    canvas = draw_masks(scene.pixels, scene.masks)
    inside = scene.masks.to_dense().any(0)
    assert (canvas[inside] != scene.pixels[inside]).any(1).mean() > 0.9
    edge = cv2.dilate(inside.astype(np.uint8), np.ones((3, 3), np.uint8)).astype(bool)
    assert np.array_equal(canvas[~edge], scene.pixels[~edge])


def test_thresholds_that_let_nothing_pass_are_named(weights, pictures, tmp_path, capsys):
    few = "--points-per-side 2 --pred-iou-thresh 0.99"
    invoke(f"segment {weights} {pictures} --out {tmp_path}/out", few)
    assert "--pred-iou-thresh" in capsys.readouterr().out


def test_a_large_image_is_segmented_by_tiles(weights, tmp_path, capsys):
    """The starter's masks of a mosaic of scenes; what cannot be is one line, and writes nothing."""
    scenes = [compose_scene(2, number) for number in range(4)]
    parts = [cv2.resize(scene.pixels, (256, 256)) for scene in scenes]
    mosaic = np.concatenate([np.concatenate(parts[:2], 1), np.concatenate(parts[2:], 1)])
    cv2.imwrite(str(tmp_path / "mosaic.png"), mosaic[..., ::-1])
    words = f"segment starter {tmp_path}/mosaic.png --points-per-side 4"
    for tile, halo, named in ((256, 200, "halo"), (8, 1, "tile")):
        out = tmp_path / "refused"
        assert named in refusal(capsys, words, f"--out {out} --tile {tile} --halo {halo}")
        assert not out.exists()
    entries = {}
    for name, flags in (("whole", ""), ("tiled", "--tile 256"), ("wide", "--tile 600")):
        out = tmp_path / name
        invoke(words, f"--out {out}", flags)
        entries[name] = annotation.parse((out / "mosaic.json").read_bytes(), name)
    assert len(entries["tiled"].masks) > len(entries["whole"].masks) > 0
    assert entries["wide"].masks.to_coco() == entries["whole"].masks.to_coco()
    boxes = entries["tiled"].masks.boxes()
    assert ((boxes[:, 2:] - boxes[:, :2]) > 0).all()
    other = refusal(capsys, words, f"--out {tmp_path}/tiled --tile 300")
    assert "other weights or settings" in other
