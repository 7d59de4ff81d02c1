"""Missing images, full disks, and commands that are interrupted or run twice at once."""

import io
import json
import os
import tarfile
from dataclasses import replace
from functools import partial

import cv2
import numpy as np
import pytest
from PIL import Image

from gigamask.data import annotation, image, tar
from gigamask.data.orientation import read_orientation, turn
from gigamask.datatools.export_formats import ExportOptions
from gigamask.inference.automatic_mask_generator import MaskProposals, SamAutomaticMaskGenerator
from gigamask.masks.rle import RLEMasks
from gigamask.models.init import build_model
from gigamask.serialization import read_json
from gigamask.workflows import segment as segmenting
from gigamask.workflows.input_images import InputImage
from gigamask.workflows.segment import Output, find_images, make_record, segment_all
from tests.errors import error_line
from tests.little import SPEC


@pytest.fixture(scope="module")
def masks() -> SamAutomaticMaskGenerator:
    return SamAutomaticMaskGenerator(
        build_model(SPEC, 0), points_per_side=2, pred_iou_thresh=0.0, stability_score_thresh=0.0
    )


@pytest.fixture
def pictures(tmp_path):
    chance = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(4):
        cv2.imwrite(
            str(folder / f"{10 + number}.png"), chance.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        )
    return find_images([str(folder)], str(tmp_path / "scratch"))[0]


@pytest.mark.slow
def test_an_interrupted_command_resumes(masks, pictures, tmp_path):
    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    output = Output(tmp_path / "out", ExportOptions(("shards",)), shard_images=2)
    with pytest.raises(KeyboardInterrupt):
        segment_all(pictures, masks, output, progress=stop)
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == [
        "10.json",
        "11.json",
        "12.json",
        "sa_000000.tar",
    ]
    (tmp_path / "out" / ".sa_000001.tar.0a1b2c3d.partial").write_bytes(
        b"half"
    )  # as a process that is killed leaves it
    counted = []
    done = segment_all(pictures, masks, output, progress=lambda *counts: counted.append(counts))
    assert (done["images"], done["existing"], done["existing_tars"], len(done["tars"])) == (
        4,
        3,
        1,
        2,
    )
    assert counted == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert not list((tmp_path / "out").glob(".sa_*"))
    assert tar.scan(tmp_path / "out" / "sa_000001.tar").names == [
        "sa_12.jpg",
        "sa_12.json",
        "sa_13.jpg",
        "sa_13.json",
    ]
    straight = Output(tmp_path / "straight", ExportOptions(("shards",)), shard_images=2)
    segment_all(pictures, masks, straight)
    for name in ("sa_000000.tar", "sa_000001.tar", "13.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


@pytest.mark.slow
def test_numbers_in_a_tar_are_those_of_this_command(masks, pictures, tmp_path):
    """A json that was made as one of other images is packed under the number it has now."""
    output = Output(tmp_path / "out", ExportOptions(("shards",)))
    segment_all(pictures[2:], masks, output)
    told = read_json(tmp_path / "out" / "12.json")
    assert (told["image"]["image_id"], told["image"]["file_name"], told["image"]["source"]) == (
        12,
        "12.png",
        "12.png",
    )
    renamed = [
        segmenting.InputImage(
            each.name, each.file_name, f"{each.path}_x" if number == 0 else each.path, each.read
        )
        for number, each in enumerate(pictures)
    ]
    segment_all(renamed, masks, output)
    assert tar.scan(tmp_path / "out" / "sa_000000.tar").names[-2:] == ["sa_3.jpg", "sa_3.json"]


@pytest.mark.slow
def test_tars_hold_the_images_of_this_command(masks, pictures, tmp_path):
    output = Output(tmp_path / "out", ExportOptions(("shards",)), shard_images=2)

    def names() -> list[list[str]]:
        tars = sorted((tmp_path / "out").glob("*.tar"))
        records = [json.loads(raw) for path in tars for raw in members(path).values()]
        found = {each["image"]["image_id"]: each["image"]["source"] for each in records}
        return [[found[int(name[3:-5])] for name in members(path)] for path in tars]

    def members(path) -> dict[str, bytes]:
        with tarfile.open(path) as opened:
            jsons = [each for each in opened if each.name.endswith(".json")]
            return {each.name: opened.extractfile(each).read() for each in jsons}

    segment_all(pictures[1:], masks, output)
    assert names() == [["11.png", "12.png"], ["13.png"]]
    done = segment_all(pictures, masks, output)
    assert done["existing_tars"] == 0
    assert names() == [["10.png", "11.png"], ["12.png", "13.png"]]
    with error_line(r"hold 1 other image such as 10"):
        segment_all(pictures[1:], masks, output)
    segment_all(pictures, masks, replace(output, shard_images=4))
    assert names() == [["10.png", "11.png", "12.png", "13.png"]]


def test_a_second_command_on_the_folder_is_refused(masks, pictures, tmp_path):
    output = Output(tmp_path / "out")

    def again(done, total):
        with error_line("another process"):
            segment_all(pictures, masks, output)

    segment_all(pictures[:1], masks, output, progress=again)


def test_masks_of_another_image_are_neither_taken_nor_replaced(masks, pictures, tmp_path):
    """As of one that has changed, or has the name of one in another folder."""
    output = Output(tmp_path / "out")
    segment_all(pictures, masks, output)
    before = (tmp_path / "out" / "10.json").read_bytes()
    changed = [replace(pictures[0], read=pictures[1].read), *pictures[1:]]
    done = segment_all(changed, masks, output)
    assert (done["images"], done["existing"]) == (3, 3)
    assert "10.json has the masks of another image" in done["skipped"][0]["reason"]
    assert (tmp_path / "out" / "10.json").read_bytes() == before


def test_unreadable_images_are_reported(masks, pictures, tmp_path, monkeypatch):
    file = tmp_path / "single.png"
    file.write_bytes((tmp_path / "pictures" / "10.png").read_bytes())
    [single], _ = find_images([str(file)], str(tmp_path / "scratch"))
    (tmp_path / "pictures" / "11.png").unlink()
    file.unlink()
    done = segment_all([*pictures, single], masks, Output(tmp_path / "out"))
    reasons = [each["reason"] for each in done["skipped"]]
    assert done["images"] == 3
    assert "11.png" in reasons[0]
    assert reasons[1].endswith(
        "single.png: cannot be read (No such file or directory); check the path and its permissions"
    )
    file.write_bytes(b"x" * 20)
    monkeypatch.setattr(segmenting.image, "MAX_BYTES", 10)
    with error_line(
        r"^none of 1 images can be used, the first: .*single.png: is larger than 10 bytes"
    ):
        segment_all([single], masks, Output(tmp_path / "none"))


def test_a_json_has_no_mask_without_pixels_and_no_score_that_is_no_number(pictures):
    dense = np.zeros((4, 6, 8), bool)
    dense[:3, 1:4, 2:7] = True
    boxes = RLEMasks.from_dense(dense).boxes().astype(np.int64)
    iou, stability = (
        np.array([0.5, np.nan, 0.25, 1], np.float32),
        np.array([0.75, 1, np.inf, 1], np.float32),
    )
    crops = np.tile(np.array([2, 0, 8, 5]), (4, 1))
    record = make_record(
        MaskProposals(
            RLEMasks.from_dense(dense), boxes, iou, stability, np.full((4, 2), 2.5), crops
        ),
        7,
        pictures[0],
    )
    assert record["image"] == {
        "image_id": 7,
        "width": 8,
        "height": 6,
        "file_name": "10.png",
        "source": "10.png",
    }
    [only] = record["annotations"]
    counts = RLEMasks.from_dense(dense[:1]).to_coco()[0].decode()
    assert only == {
        "bbox": [2, 1, 4, 2],
        "area": 15,
        "segmentation": {"size": [6, 8], "counts": counts},
        "predicted_iou": 0.5,
        "point_coords": [[2.5, 2.5]],
        "crop_box": [2, 0, 6, 5],
        "id": 70000,
        "stability_score": 0.75,
    }


def test_no_more_masks_are_written_than_readers_take(masks, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(annotation, "MAX_MASKS", 0)
    segment_all(pictures, masks, Output(tmp_path / "out"))
    assert read_json(tmp_path / "out" / "13.json")["annotations"] == []


@pytest.mark.slow
def test_a_full_disk_is_an_error(masks, pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "write", partial(_full))
    with error_line(r"sa_000000.tar: cannot be written \(No space left on device\)"):
        segment_all(pictures, masks, Output(tmp_path / "out", ExportOptions(("shards",))))
    assert (tmp_path / "out" / "13.json").exists()


def _full(*_):
    raise OSError(28, os.strerror(28))


def test_no_path_is_no_image(tmp_path):
    with error_line(r"^IMAGE is required"):
        find_images([], str(tmp_path))


def test_other_files_of_a_glob_of_images_are_left_out_as_in_a_folder(pictures, tmp_path):
    (tmp_path / "pictures/notes.txt").write_text("no image")
    found, _ = find_images([str(tmp_path / "pictures/*")], str(tmp_path / "scratch"))
    assert [each.path for each in found] == [each.path for each in pictures]
    (tmp_path / "pictures/a.heic").write_bytes(b"no image")
    with error_line(r"a\.heic.*HEIC is not read"):
        find_images([str(tmp_path / "pictures/*")], str(tmp_path / "scratch"))


@pytest.mark.slow
@pytest.mark.parametrize("orientation", [3, 6])
def test_files_are_segmented_upright_and_members_of_tars_as_stored(masks, tmp_path, orientation):
    """The JSON, the tar and the picture agree; a tar's masks refer to its pixels as stored."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    stored = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    upright = turn(stored, orientation)
    Image.fromarray(stored).save(file, "JPEG", quality=95, subsampling=0, exif=exif)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_bytes(file.getvalue())
    tar.write(tmp_path / "own.tar", iter([("sa_1.jpg", file.getvalue())]))
    expected = {"photos": upright, "photos/1.jpg": upright, "own.tar": stored}
    for number, (name, pixels) in enumerate(expected.items()):
        out = Output(
            tmp_path / f"{number}",
            ExportOptions(("shards",)),
            pictures=tmp_path / f"{number}" / "seen",
        )
        inputs, _ = find_images([str(tmp_path / name)], str(tmp_path / f"scratch{number}"))
        made = segment_all(inputs, masks, out)
        assert made["turned"] == (name != "own.tar")
        (path,) = made["tars"]
        with tarfile.open(path) as archive:
            raw, record = (archive.extractfile(each).read() for each in archive)  # pyrefly: ignore
        entry = annotation.parse(record, "x")
        assert entry.size == pixels.shape[:2]
        assert read_orientation(raw) == 1
        found = image.decode(raw, "x").astype(int)
        assert np.abs(found - pixels).mean() < 12
        (seen,) = (tmp_path / f"{number}" / "seen").rglob("*.png")
        assert cv2.imread(str(seen)).shape == pixels.shape


@pytest.mark.slow
def test_masks_are_written_in_other_formats_too(masks, pictures, tmp_path):
    table = tmp_path / "regions.csv"
    export = ExportOptions(("coco", "labels"), polygons=True, table=table)
    output = Output(tmp_path / "out", export)
    found = segment_all(pictures, masks, output)
    expected = [tmp_path / "out" / "coco.json", tmp_path / "out" / "labels", table]
    assert found["written"] == list(map(str, expected))
    content = read_json(expected[0])
    assert len(content["images"]) == 4
    assert len(content["annotations"]) == found["masks"]
    assert {"score", "predicted_iou", "stability_score"} <= content["annotations"][0].keys()
    assert len(table.read_text().splitlines()) == 1 + found["masks"]
    with error_line("--to voc"):
        Output(tmp_path / "out", ExportOptions(("voc",)))


@pytest.mark.parametrize("own", ["out/b.json", "seen/b.png", "out/coco.json", "out/images/a.png"])
def test_files_that_it_did_not_write_are_not_replaced(masks, tmp_path, own):
    read = (tmp_path / "b.png").read_bytes
    photo = InputImage(str(tmp_path / "b.png"), "b.png", "b", read)
    (tmp_path / own).parent.mkdir(parents=True)
    (tmp_path / own).write_bytes(b"drawn by hand")
    output = Output(tmp_path / "out", ExportOptions(("coco", "yolo")), pictures=tmp_path / "seen")
    with error_line("would be replaced"):  # before the photo is read, which is missing
        segment_all([photo], masks, output)
    assert (tmp_path / own).read_bytes() == b"drawn by hand"


@pytest.mark.parametrize("own", ["out/10.json", "seen/10.png"])
def test_nor_are_those_that_came_later(masks, pictures, tmp_path, own):
    output = Output(tmp_path / "out", pictures=tmp_path / "seen")
    segment_all(pictures[1:], masks, output)
    (tmp_path / own).write_text('{"shapes": []}')
    done = segment_all(pictures, masks, output)
    assert (done["images"], done["existing"]) == (3, 3)
    assert f"{own} would be replaced" in done["skipped"][0]["reason"]
    assert (tmp_path / own).read_text() == '{"shapes": []}'


def test_nor_is_a_tar_that_came_later(masks, pictures, tmp_path):
    segment_all(pictures, masks, Output(tmp_path))
    (tmp_path / "sa_000001.tar").write_bytes(b"packed by hand")
    shards = ExportOptions(("shards",))
    with error_line("sa_000001.tar: would be replaced"):
        segment_all(pictures, masks, Output(tmp_path, shards, shard_images=2))
    assert (tmp_path / "sa_000001.tar").read_bytes() == b"packed by hand"
    segment_all(pictures, masks, Output(tmp_path, shards))


def test_results_of_other_points_or_another_threshold_are_refused(masks, pictures, tmp_path):
    model, output = build_model(SPEC, 0), Output(tmp_path / "out")
    given = {
        "pred_iou_thresh": 0.0,
        "stability_score_thresh": np.float32(0),
        "points_per_side": None,
    }

    def run(*points) -> None:
        found = SamAutomaticMaskGenerator(model, point_grids=[np.array([points])], **given)
        segment_all(pictures, found, output)

    run(0.5, 0.5)
    run(0.5, 0.5)
    with error_line("other weights or settings"):
        run(0.1, 0.5)
    model.mask_threshold = 1.0
    with error_line("other weights or settings"):
        run(0.5, 0.5)


def test_images_in_a_folder_that_a_format_writes_are_refused(masks, pictures, tmp_path):
    [*others, last] = pictures
    output = Output(tmp_path / "out", ExportOptions(("yolo",)))
    with error_line("out/images, where --to writes"):
        segment_all([*others, replace(last, path="images/13")], masks, output)
