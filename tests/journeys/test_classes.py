"""Classes from the masks' categories to predictions, as commands do it."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask import Sam, SamAutomaticMaskGenerator, SamPredictor
from gigamask.config_files import load_config
from gigamask.data import index
from gigamask.models import state_dict
from gigamask.serialization import read_json
from gigamask.synthetic.scenes import compose_scene
from gigamask.synthetic.shapes import OUTLINES
from tests.commands import LITTLE, invoke, refusal
from tests.journeys.runs import records

NAMES = tuple(sorted(OUTLINES))


@pytest.fixture(scope="module")
def command(scenes) -> str:
    """A training on the scenes, without its folder."""
    return f"train {LITTLE}_compact --data {scenes} --out"


@pytest.fixture(scope="module")
def run(command, tmp_path_factory) -> Path:
    """A run with all categories of the scenes, trained for two steps."""
    out = tmp_path_factory.mktemp("classes") / "run"
    invoke(command, out, "--classes auto --steps 2")
    return out


@pytest.mark.long
def test_all_categories_are_found_and_recorded(run, command, capsys):
    """The same command continues the run, and its weights state the names."""
    assert load_config(str(run), trust=True).model.class_names == NAMES
    weights, config = state_dict.read_weights(run)
    assert config.class_names == NAMES
    assert weights["mask_decoder.class_head.layers.2.bias"].shape == (len(NAMES),)
    assert all(0 <= each["class_accuracy"] <= 1 for each in records(run))
    invoke(command, run, "--classes auto --steps 3")
    assert "model.class-names" not in capsys.readouterr().out
    other = refusal(capsys, command, run, "--classes ring star --steps 4")
    assert "--model.class-names was" in other


def test_other_classes_start_from_the_weights(run, command, tmp_path):
    words = f"--init {run} --steps 1 --classes ring star --ignore-other-classes"
    invoke(command, tmp_path / "run", words)
    assert state_dict.read_weights(tmp_path / "run")[1].class_names == ("ring", "star")


def test_masks_are_written_with_their_classes(run, scenes, tmp_path):
    """In JSONs, in tars whose index counts them, in records, and by name in pictures."""
    lenient = "--points-per-side 2 --pred-iou-thresh 0 --stability-score-thresh 0"
    out, tar = tmp_path / "out", next(scenes.glob("*.tar"))
    segment = f"segment {run} {tar} --out {out} --to shards"
    invoke(segment, lenient, f"--pictures {tmp_path}/pictures")
    found = [read_json(path) for path in sorted(out.glob("*/sa_*.json"))]
    masks = [mask for record in found for mask in record["annotations"]]
    assert len(found) == 12
    for mask in masks:
        assert mask["category"] == NAMES[mask["category_id"]]
        assert 1 / len(NAMES) <= mask["class_score"] <= 1
    counts = index.build(sorted(out.glob("*.tar")), tmp_path / "index")
    assert sum(counts.manifest.categories.values()) == len(masks)
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == 12
    pixels = compose_scene(7, 0).pixels
    model = Sam.from_pretrained(run)
    found = SamAutomaticMaskGenerator(model, 2, pred_iou_thresh=0, stability_score_thresh=0)
    (first, *_) = found.generate(pixels)
    assert first["category"] == NAMES[first["category_id"]]
    for tile in (None, 64):
        predictor = SamPredictor(model, tile=tile)
        predictor.set_image(pixels)
        assert predictor.class_scores is None
        predictor.predict(box=np.array([30, 30, 90, 80]))
        assert predictor.class_scores.shape == (1, 3, len(NAMES))
        torch.testing.assert_close(predictor.class_scores.sum(2), torch.ones(1, 3))


def test_classes_are_scored(run, scenes, tmp_path, capsys):
    """By clicks and box, and as average precision of automatic masks."""
    path = tmp_path / "scores.json"
    words = f"--automatic --points-per-side 4 --max-images 4 --json {path}"
    invoke(f"evaluate {run} --data {scenes}", words)
    out = capsys.readouterr().out
    assert "class accuracy:" in out
    assert "with classes:" in out
    scores = read_json(path)
    accuracy, classes = scores["class_accuracy"], scores["automatic"]["classes"]
    assert 0 < accuracy["masks"] < scores["masks"], "parts have no class"
    assert list(accuracy) == ["masks", "1", "2", "3", "5", "9", "box"]
    assert all(0 <= accuracy[name] <= 1 for name in ("1", "9", "box"))
    assert 0 <= classes["AP"] <= 1
    assert set(classes["by_class"]) <= set(NAMES)


@pytest.mark.parametrize(
    "words, found",
    [
        ("--classes ring star", r"--classes lacks .*blob \(\d+\).*--ignore-other-classes"),
        ("--classes cat --ignore-other-classes", r"no mask of .* among cat; it has blob"),
        ("--classes auto --loader.mask-store x", "--loader.mask-store x .*--classes"),
        ("--classes auto --class-weight -1", "--class-weight"),
    ],
)
def test_what_cannot_be_trained_is_one_line(run, command, tmp_path, words, found, capsys):
    line = refusal(capsys, command, tmp_path / "out", words.format(run=run))
    assert re.search(found, line), line
    assert not (tmp_path / "out").exists()


def test_data_without_categories_are_one_line(tmp_path, capsys):
    invoke(f"synth {tmp_path}/cells --kind cells --images 2")
    words = f"--data {tmp_path}/cells --out {tmp_path}/out --classes auto"
    assert "no mask of --data" in refusal(capsys, f"train {LITTLE}_compact", words)
