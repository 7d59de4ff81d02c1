"""`gigamask evaluate --boxes`: mask AP of a detector's boxes on COCO's and LVIS's files."""

import json
import re
from pathlib import Path

import pytest

from gigamask.cli.main import main
from gigamask.models.init import build_model
from tests import instances
from tests.little import SPEC
from tests.ranks import fork

WORDS = "--images photos --boxes boxes.json --device cpu".split()
DATA = ["--data", "instances.json", *WORDS]


@pytest.fixture(scope="module")
def coco(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("coco"))


@pytest.fixture(scope="module")
def lvis(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("lvis"), lvis=True)


def make(folder: Path, lvis: bool = False) -> Path:
    model = build_model(SPEC, 0)
    model.save_pretrained(folder / "model")
    instances.write(folder, model.eval(), lvis)
    return folder


def evaluate(*words: str) -> int:
    return main(["evaluate", "model", *words])


@pytest.mark.long
def test_two_processes_print_what_one_does(coco, tmp_path, monkeypatch, capfd):
    """Three images between two; with pictures, and the clicks of EfficientSAM."""
    monkeypatch.chdir(coco)
    words = [*DATA, "--batch-size", "1", "--click-protocol", "efficient_sam"]
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert evaluate(*words, "--json", str(one)) == 0
    alone = capfd.readouterr().out
    assert re.search(r"13 masks on 3 images\n +1 click +3 clicks +oracle +box", alone)
    assert "30 masks found, 14 to find, on 3 images" in alone
    assert "detected boxes (confident: of three masks that with the highest predicted IoU" in alone
    assert "  left out 13.jpg: its annotation 5 (id 99): polygon 0 has 2 numbers" in alone
    fork(2, evaluate, *words, "--json", str(two))
    assert capfd.readouterr().out == alone
    assert json.loads(one.read_text()) == json.loads(two.read_text())
    more = f"--pictures {tmp_path}/figures --html {tmp_path}/page.html".split()
    assert evaluate(*words, "--max-images", "2", "--box-answer", "refined", *more) == 0
    out = capfd.readouterr().out
    assert "20 masks found, 10 to find, on 2 images" in out
    assert "(refined:" in out
    page = (tmp_path / "page.html").read_text()
    assert "Masks of detected boxes" in page
    assert (tmp_path / "figures" / "worst.png").is_file()


def test_lvis_and_what_is_left_out(lvis, monkeypatch, capfd):
    """The folder may hold val2017 or be it; an image that is not there is said to be left out."""
    monkeypatch.chdir(lvis)
    assert evaluate(*DATA, "--json", "whole.json") == 0
    whole = capfd.readouterr().out
    for name in ("AP rare", "AP common", "AP frequent", "AR@300"):
        assert re.search(rf"^{name} +\d+\.\d$", whole, re.M)
    found = json.loads(Path("whole.json").read_text())["detected_boxes"]
    assert found["protocol"]["federated"]
    assert found["found"] == 27, "nobody looked for the category of three"
    words = ["--data", "photos/val2017", "--masks", "instances.json", *WORDS[2:]]
    assert evaluate(*words) == 0
    first, others = capfd.readouterr().out.split("\n", 1)
    assert first == "evaluate model on photos/val2017"
    assert others == whole.split("\n", 1)[1]
    Path("photos/val2017/12.jpg").rename("12.jpg")
    assert evaluate(*DATA) == 0
    out = capfd.readouterr().out
    assert "on 2 images" in out
    assert "skipped val2017/12.jpg" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--data instances.json --boxes boxes.json".split(), "--boxes needs .* --images FOLDER"),
        ([*DATA, "--automatic"], "--automatic does not go with --boxes"),
        ([*DATA, "--min-predicted-iou", "0.5"], "--min-predicted-iou does not go with --boxes"),
        ([*DATA, "--submit", "local"], "--boxes keeps all predicted masks"),
        ([*DATA[:4], "--box-answer", "refined"], "--box-answer is about .* --boxes"),
        ([*DATA, "--images", "none"], "none: no such file or folder.*check --data, --images"),
        ([*DATA, "--boxes", "none.json"], "none.json: cannot be read"),
        ([*DATA, "--boxes", "instances.json"], "instances.json: is not COCO's results format"),
        ([*DATA, "--data", "boxes.json"], "boxes.json: holds a list"),
        ([*DATA, "--boxes", "bad.json"], "bad.json: detection 0 of 1: its image_id 99 is not in"),
    ],
)
def test_what_cannot_be_used_is_one_line(coco, words, reason, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(coco)
    row = {"image_id": 99, "category_id": 3, "bbox": [1, 1, 4, 4], "score": 1}
    Path("bad.json").write_text(json.dumps([row]))
    scores = tmp_path / "scores.json"
    assert evaluate(*words, "--json", str(scores)) == 2
    (line,) = [each for each in capfd.readouterr().err.splitlines() if each.strip()]
    assert re.search(reason, line), line
    assert not scores.exists()
