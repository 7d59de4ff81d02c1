"""`--data` with `--images` or `--masks`: annotations as they lie are converted once."""

import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import gigamask
from gigamask.config_files import load_config
from gigamask.models.init import build_model
from gigamask.serialization import read_json
from tests.commands import LITTLE, invoke, refusal
from tests.forked import forked  # noqa: F401 (a fixture)
from tests.little import SPEC, little

TRAIN = f"train {LITTLE} --out run --steps 2"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with photographs, COCO's JSON and label images."""
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    Path("photos").mkdir()
    Path("labels").mkdir()
    images, annotations = [], []
    for i in range(12):
        pixels = chance.integers(0, 255, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"photos/p{i}.png")
        labels = np.zeros((48, 64), np.uint8)
        labels[5:20, 8:30], labels[25:40, 30:60] = 1, 2
        Image.fromarray(labels).save(f"labels/p{i}.png")
        images.append({"id": i, "file_name": f"p{i}.png", "width": 64, "height": 48})
        ring = [8, 5, 30, 5, 30, 20, 8, 20]
        annotations.append({"id": i, "image_id": i, "segmentation": [ring]})
    annotations.append({"id": 99, "image_id": 0, "segmentation": [[1, 2]]})
    Path("coco.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    return tmp_path


def test_coco_is_converted_once(here, capsys):
    invoke(TRAIN, "--data coco.json --images photos")
    out = capsys.readouterr().out
    assert "12 images with 12 masks" in out
    assert "masks left out: 1" in out
    config = load_config("run", trust=True)
    (data,) = map(Path, config.data)
    assert data.parent.parent.name == "coco.json.gigamask"
    assert (config.images, config.masks) == (None, None)
    (tar,) = data.glob("*.tar")
    written = tar.stat().st_mtime_ns
    invoke(TRAIN, "--data coco.json --images photos --steps 3")
    assert "changed from 2 to 3" in capsys.readouterr().out, "the run goes on"
    assert tar.stat().st_mtime_ns == written
    invoke("train --resume run --steps 4")


def test_changed_annotations_are_converted_again(here):
    invoke(TRAIN, "--data photos --masks labels")
    first = load_config("run", trust=True).data
    Image.fromarray(np.ones((48, 64), np.uint8)).save("labels/p0.png")
    invoke(TRAIN, "--data photos --masks labels --out other")
    second = load_config("other", trust=True).data
    assert first != second
    assert Path(first[0]).is_dir()


@pytest.mark.long
def test_a_part_is_held_out(here, capsys):
    words = "--data photos --masks labels --val-split 0.4"
    invoke(TRAIN, words, "--evaluation.interval 1")
    out = capsys.readouterr()
    config = load_config("run", trust=True)
    counts = [
        read_json(Path(path) / "converted.json")["images"]
        for path in (*config.data, *config.evaluation.data)
    ]
    assert counts == [7, 5]
    assert "evaluated at step 1" in out.err
    assert f"next: gigamask evaluate run --data {config.evaluation.data[0]}" in out.out


def test_the_python_api(here, capsys):
    config = little().with_(data="photos", masks="labels", val_split=0.4, out="run", steps=1)
    run = gigamask.train(config)
    assert Path(run.config.data[0]).parent.parent.name == "labels.gigamask"
    assert run.evaluate(run.config.evaluation.data, max_images=2)["images"] == 2
    assert "training data" not in capsys.readouterr().out
    run.evaluate(run.config.data, max_images=2)
    assert "2 of 2 images are training data of run" in capsys.readouterr().out


def test_other_commands_take_the_same_data(here, capsys):
    build_model(SPEC, 4).save_pretrained("model")
    words = "--data coco.json --images photos --device cpu --json scores.json"
    invoke("evaluate model", words, "--max-images 2 --table scores.csv --pictures drawn")
    assert "masks left out: 1" in capsys.readouterr().out
    scores = read_json("scores.json")
    assert (scores["images"], scores["masks"]) == (2, 2)
    assert ",p0.png," in Path("scores.csv").read_text()
    assert Path(scores["data"][0]).parent.parent.name == "coco.json.gigamask"
    invoke("stats photos --masks labels")
    assert "12 images with 24 masks" in capsys.readouterr().out
    assert "one path" in refusal(capsys, "stats photos coco.json --masks labels")
    Path("held_out.json").write_bytes(Path("coco.json").read_bytes())
    held_out = "--evaluation.data held_out.json --evaluation.interval 1 --steps 1"
    invoke(f"train {LITTLE} --out run --data coco.json --images photos", held_out)
    (found,) = load_config("run", trust=True).evaluation.data
    assert Path(found).parent.parent.name == "held_out.json.gigamask"


def voc_palette() -> list[int]:
    """Return the palette of Pascal VOC: bits of the index, spread over the colors' high bits."""
    index, colors = np.arange(256), np.zeros((256, 3), int)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= ((index >> (3 * bit + channel)) & 1) << (7 - bit)
    return colors.ravel().tolist()


def test_pascal_voc_as_it_is_published(here, capsys):
    voc = Path("VOCdevkit/VOC2012")
    for name in ("JPEGImages", "SegmentationObject", "SegmentationClass", "ImageSets/Segmentation"):
        (voc / name).mkdir(parents=True)
    (voc / "ImageSets/Segmentation/train.txt").write_text("2007_000000\n")
    for i in range(4):  # the last has no masks, as most of VOC's images
        name = f"2007_00000{i}"
        Image.new("RGB", (64, 48), (i, 90, 30)).save(voc / f"JPEGImages/{name}.jpg")
        objects, classes = np.full((48, 64), 0, np.uint8), np.zeros((48, 64), np.uint8)
        objects[4:21, 7:31] = classes[4:21, 7:31] = 255  # the border around the first object
        objects[5:20, 8:30], objects[30:40, 5:60] = 1, 2
        classes[5:20, 8:30], classes[30:40, 5:60] = 15, 7
        for kind, pixels in (("Object", objects), ("Class", classes)):
            label = Image.fromarray(pixels, "P")
            label.putpalette(voc_palette())
            if i < 3:
                label.save(voc / f"Segmentation{kind}/{name}.png")
    invoke(f"stats {voc}")
    assert "3 images with 6 masks" in capsys.readouterr().out, "255 is no object"
    (tar,) = voc.glob("SegmentationObject.gigamask/*/all/*.tar")
    with tarfile.open(tar) as opened:
        names = [each for each in opened.getnames() if each.endswith(".json")]
        record = json.loads(opened.extractfile(names[0]).read())
    names = ("label", "category_id", "category", "area")
    found = {tuple(each[name] for name in names) for each in record["annotations"]}
    assert found == {(1, 15, "person", 15 * 22), (2, 7, "car", 10 * 55)}
    words = f"--masks {voc}/SegmentationObject --val-split 0.4 --strict"
    invoke(TRAIN, f"--data {voc}/JPEGImages", words)
    invoke(TRAIN, f"--data {voc} --val-split 0.4 --out other")
    of_runs = [load_config(run, trust=True) for run in ("run", "other")]
    assert of_runs[0].data == of_runs[1].data


def test_a_script_learns_that_something_was_left_out(here, capsys):
    assert "--strict: 1 of the images or masks" in refusal(
        capsys, TRAIN, "--data coco.json --images photos --strict"
    )
    assert not Path("run").exists()
    convert = "convert coco.json --images photos --json told.json"
    invoke(convert, "--out tars")
    assert "--strict: 1 of the images or masks" in refusal(capsys, convert, "--out strict --strict")
    assert len(read_json("told.json")["skipped_masks"]) == 1
    assert list(Path("strict").glob("*.tar"))
    Path("photos/p0.png").write_bytes(b"no image")
    segment = "segment starter photos/p0.png photos/p1.png --points-per-side 1"
    invoke(segment, "--out seen")
    assert "--strict: 1 images were left out" in refusal(capsys, segment, "--out seen --strict")


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_submitted_trainings_take_them(here):
    words = "--data coco.json --images photos --submit local"
    invoke(f"train {LITTLE} --out run --steps 1", words)
    assert Path(load_config("run", trust=True).data[0]).parent.parent.name.startswith("coco.json")


@pytest.mark.parametrize(
    "words, found",
    [
        ("--data coco.json coco.json --images photos", "is one path"),
        ("--data coco.json --images photos --masks labels", "is one path"),
        ("--data photos --masks coco.json --val-split 2", "--val-split"),
        ("--data photos --masks photos", "label image's pixels|no image|unusable"),
    ],
)
def test_what_cannot_be_used_is_one_line(here, words, found, capsys):
    line = refusal(capsys, TRAIN, words)
    assert re.search(found, line), line
    assert not Path("run").exists()


def test_masks_that_do_not_pair_are_one_line(here, capsys):
    for path in Path("photos").iterdir():
        path.rename(path.with_name(f"other_{path.name}"))
    err = refusal(capsys, TRAIN, "--data photos --masks labels")
    assert "12 of its 12 images are unusable" in err
    assert "there is no image p0" in err
