"""Finding masks by text: queries, training, evaluation and `ask`."""

import json
import shlex
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import ExifTags, Image

from gigamask.data import index as indexes
from gigamask.data.image import decode
from gigamask.data.shards import ShardReader
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.serialization import read_json
from gigamask.training import checkpoint
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.plugins.grounding import asked

FEW = "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"


def main(words: str, *more: object) -> int:
    """Run a command; the recipe of most runs here is not built in."""
    trust = "--trust" if words.startswith(("ask", "ground evaluate")) else ""
    return exit_code(words, *more, trust)


def ground(described: Path, out: Path, words: str) -> int:
    return main(f"ground train {asked.RECIPE}", *asked.flags(described, out), words)


@pytest.fixture(scope="module")
def run(described, tmp_path_factory) -> Path:
    """A run of four updates, in which half of the images are held out."""
    out = tmp_path_factory.mktemp("ground") / "run"
    assert ground(described, out, "--val-split 0.5") == 0
    return out


@pytest.fixture(scope="module")
def picture(described, tmp_path_factory) -> Path:
    """The first image as a file of its own, and its json beside it."""
    folder = tmp_path_factory.mktemp("picture")
    index = indexes.open_or_build([str(described / "scenes")], str(folder / "index"))
    shards = ShardReader(index.shard_paths)
    jpg, told = shards.read_entry(index, 0)
    shards.close()
    (folder / "photo.jpg").write_bytes(jpg)
    (folder / "photo.json").write_bytes(told)
    return folder / "photo.jpg"


@pytest.mark.long
def test_queries_training_and_predictions(tmp_path, capsys, monkeypatch, described):
    """The commands in a row, with the recipe's text model and a segmenter of the same width."""
    monkeypatch.chdir(tmp_path)
    assert main("ground synth scenes --images 4") == 0
    assert "scenes/queries.jsonl" in capsys.readouterr().out
    words = (
        "ground train ground_tiny --data scenes --queries scenes/queries.jsonl --segmenter "
        f"{described}/segmenter.safetensors --out runs/words --steps 2 --batch-size 4 "
        "--micro-batch-size 4 --model.embedding-dim 16 --model.dim 16 --val-split 0.6 --device cpu"
    )
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(
        'next: gigamask ask runs/words IMAGE "WORDS", or gigamask ground evaluate runs/words '
        "--calibrate\n"
    )
    assert main("ground evaluate runs/words") == 0
    assert " nonsense" in capsys.readouterr().out.splitlines()[-1]
    asked = "ask runs/words scenes/sa_000000.tar:0 'the red disc' 'zxqv blorp 7' --json told.json"
    assert main(asked) == 0
    said, note = capsys.readouterr().out, "no word of it is in the training queries: zxqv, blorp, 7"
    assert said.count("the red disc: ") == said.count(note) == 1
    told = read_json("told.json")
    assert told["answers"][1]["note"] == note


def test_a_run_is_scored_on_what_it_held_out(run, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main(f"ground evaluate {run} --json {told} --calibrate --device cpu") == 0
    printed, summary = capsys.readouterr().out, read_json(told)
    assert f"{summary['queries']} queries about {summary['images']} images" in printed
    assert str(run / "confidence.json") in printed
    assert 0 < summary["images"] < 6
    assert set(summary["rules"]) == {"chance", "largest", "prior"}
    assert {"segmenter", "data", "query_files", "protocol", "skipped"} < summary.keys()
    assert (summary["val_split"], summary["weights"], summary["run"]) == (0.5, str(run), str(run))
    assert asdict(Confidence.load(str(run))) == summary["confidence"]
    assert main(f"ground evaluate {checkpoint.newest(run)} --json {told}") == 0
    again = read_json(told)
    assert again["confidence"] == summary["confidence"], "the saved one is scored"
    assert set(again["refusals"]) == set(again["calibration"]) == {"uncalibrated", "saved"}
    assert again["refusals"]["uncalibrated"] == summary["refusals"]["uncalibrated"]
    assert again["top_1"] == summary["top_1"]


def test_a_run_is_scored_on_other_data(run, described, tmp_path, capsys):
    shutil.copytree(described / "scenes", tmp_path / "other")
    queries = (tmp_path / "other" / "queries.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(queries[:5]) + "\n")
    told = tmp_path / "told.json"
    words = f"ground evaluate {run} --data {tmp_path}/other --queries {tmp_path}/few.jsonl"
    assert main(f"{words} --json {told}") == 0
    summary = read_json(told)
    assert (summary["query_files"], summary["val_split"], summary["data"]) == (
        [str(tmp_path / "few.jsonl")],
        0.0,
        [str(tmp_path / "other")],
    )
    assert "5 queries about 1 image" in capsys.readouterr().out
    moved = tmp_path / "moved.safetensors"
    shutil.copy(described / "segmenter.safetensors", moved)
    assert main(f"{words} --json {told} --segmenter {moved}") == 0
    assert read_json(told)["segmenter"] == str(moved)


def test_query_an_image_a_tar_and_an_image_with_annotation(
    run, described, picture, tmp_path, capsys
):
    told, drawn = tmp_path / "told.json", tmp_path / "drawn"
    texts = ["the red disc", "the large blue box left of the small ring"]
    words = f"{shlex.join(texts)} --json {told} --top 2"
    scene = f"{described}/scenes/sa_000000.tar:0"
    assert main(f"ask {run} {scene} {words} --pictures {drawn}") == 0
    printed, answers = capsys.readouterr().out, read_json(told)["answers"]
    assert [each["text"] for each in answers] == texts
    masks = len(read_json(picture.with_suffix(".json"))["annotations"])
    shown = decode(picture.read_bytes(), "photo")
    for number, each in enumerate(answers):
        first, second = each["best"]
        assert each["candidates"] == masks
        assert first["confidence"] >= second["confidence"]
        assert f"mask {first['mask']}: confidence {first['confidence']:.3f}, x " in printed
        height, width = cv2.imread(str(drawn / f"answer_{number}.png")).shape[:2]
        assert (height - shown.shape[0] >= 24, width) == (True, shown.shape[1]), "a caption below"
    annotation, turned = picture.with_suffix(".json"), tmp_path / "turned.png"
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.fromarray(np.rot90(shown)).save(turned, exif=exif)
    for photo in (picture, turned):
        assert main(f"ask {run} {photo} {words} --annotation {annotation}") == 0
        assert read_json(told)["answers"] == answers
    assert main(f"ask {checkpoint.newest(run)} {picture} {words} {FEW}") == 0
    found, _ = read_json(told)["answers"]
    assert found["candidates"] > 1
    height, width = shown.shape[:2]
    for x0, y0, x1, y1 in (each["box"] for each in found["best"]):
        assert 0 <= x0 <= x1 < width
        assert 0 <= y0 <= y1 < height


def test_a_png_and_an_image_without_a_json(run, picture, tmp_path, capsys):
    from gigamask.data import tar

    pixels = decode(picture.read_bytes(), "photo")
    cv2.imwrite(str(tmp_path / "photo.png"), pixels[..., ::-1])
    tar.write(tmp_path / "bare.tar", [("sa_5.jpg", picture.read_bytes())])
    for image in (tmp_path / "photo.png", f"{tmp_path}/bare.tar:5"):
        assert main(f"ask {run} {image} red {FEW}") == 0
        assert "red: " in capsys.readouterr().out


def test_parts_are_chosen_by_name(described, tmp_path):
    parts = "--sampler relevance_diversity --text.lora-rank 2 --optimizer muon --precision bf16"
    run = tmp_path / "run"
    assert ground(described, run, f"--steps 2 {parts}") == 0
    assert main(f"ask {run} {described}/scenes/sa_000000.tar:1 'the box'") == 0


def test_help_is_there(capsys):
    for words, message in (
        ("ground", "usage: gigamask ground train RECIPE --segmenter WEIGHTS"),
        ("ground --help", "gigamask ground evaluate RUN [--data PATH... --queries FILE...]"),
        ("ground train --help", "RECIPE --segmenter WEIGHTS --queries FILE"),
        ("ground evaluate --help", "score a grounding model"),
        ("ground train ground_tiny --help", "--segmenter"),
        ("ask --help", "--annotation"),
    ):
        with suppress(SystemExit):
            assert exit_code(words) == 0
        assert message in capsys.readouterr().out, words


def refused(capsys, words, message):
    capsys.readouterr()
    assert main(words) == 2, words
    said = capsys.readouterr().err
    assert message.lower() in said.lower(), said
    assert said.count("\n") == 1, said


def test_invalid_training_flags_are_a_one_line_error(described, run, tmp_path, capsys):
    out = tmp_path / "run"
    train = f"train {asked.RECIPE} {' '.join(asked.flags(described, out))}"
    for words, message in (
        (f"ground {train} --segmenter {run}", str(run)),
        (f"ground {train} --model.embedding-dim 64", "--model.embedding-dim is 64"),
        (f"ground {train} --text.name {tmp_path}/gone", "gone"),
        ("ground train tiny", "recipe tiny is for 'gigamask train', not"),
        (train, "is for 'gigamask ground train', not"),
        ("ground train", "needs a recipe (ground, ground_tiny, or file.py:function)"),
        (f"ground train --resume {tmp_path}/gone", "no such folder"),
        (f"ground train --resume {run} --max-masks 3", "--max-masks was"),
        ("ground test", "'ground test'"),
    ):
        refused(capsys, words, message)
        assert not (out / "checkpoints").exists(), words
    assert main(f"ground train --resume {run} --max-masks 5 --allow-data-change") == 0


def test_invalid_evaluation_flags_are_a_one_line_error(described, run, tmp_path, capsys):
    plain, segmented = tmp_path / "plain", tmp_path / "tiny"
    invoke(f"train {LITTLE} --data {described}/scenes --steps 1 --out {segmented}")
    assert ground(described, plain, "--steps 1") == 0
    for words, message in (
        ("ground evaluate", "missing"),
        (f"ground evaluate {segmented}", f"{segmented}: "),
        (f"ground evaluate {plain}", "--data PATH... --queries FILE..."),
        (f"ground evaluate {run} --data {described}/scenes", "--data and --queries"),
        (f"ask {segmented} {tmp_path}/x.jpg red", f"{segmented}: "),
    ):
        refused(capsys, words, message)


@pytest.mark.long
def test_invalid_input_is_a_one_line_error(described, run, picture, tmp_path, capsys):
    tar = f"{described}/scenes/sa_000000.tar"
    small = read_json(picture.with_suffix(".json"))
    (tmp_path / "none.json").write_text(json.dumps({**small, "annotations": []}))
    small["image"] |= {"width": 3, "height": 2}
    small["annotations"] = [
        {**small["annotations"][0], "segmentation": {"size": [2, 3], "counts": [0, 6]}}
    ]
    (tmp_path / "small.json").write_text(json.dumps(small))
    (tmp_path / "no.json").write_text("{")
    empty = tmp_path / "empty"
    shutil.copytree(run, empty)
    shutil.rmtree(empty / "checkpoints")
    for words, message in (
        ("ask", "missing"),
        (f"ask {run} {tar}:0", "TEXT"),
        (f"ask {run} {tar}:0 red --top 0", "--top"),
        (f"ask {run} {tmp_path} red", f"{tmp_path}: is a folder"),
        (f"ask {run} {tar}:77 red", "77"),
        (f"ask {run} {tar} red", "sa_000000.tar:sa_1"),
        (f"ask {run} {picture} red --annotation {tmp_path}/gone.json", "gone.json: "),
        (f"ask {run} {picture} red --annotation {tmp_path}/small.json", "2 x 3"),
        (f"ask {run} {picture} red --annotation {tmp_path}/no.json", "no.json: its json"),
        (f"ask {run} {picture} red --annotation {tmp_path}/none.json", "none.json: "),
        (f"ask {run} {picture} red --points-per-side 2 --pred-iou-thresh 1", "--pred-iou-thresh"),
        (f"ask {empty} {tar}:0 red", f"{empty}: "),
        (f"ask {run}/checkpoints {tar}:0 red", f"pass {run}"),
    ):
        refused(capsys, words, message)


def test_a_model_of_words_is_trained_on_the_starters_masks_and_asked(tmp_path, capsys):
    scenes = tmp_path / "scenes"
    invoke(f"ground synth {scenes} --images 4")
    train = f"ground train ground_tiny --segmenter starter --data {scenes} --steps 2"
    train += f" --queries {scenes}/queries.jsonl --out {tmp_path}/words"
    assert "the segmenter's embedding has 97 channels; pass 97" in refusal(capsys, train)
    invoke(train, "--model.embedding-dim 97")
    image = f"{next(scenes.glob('*.tar'))}:sa_0"
    capsys.readouterr()
    invoke(f"ask {tmp_path}/words {image} 'the largest circle'")
    assert "\nthe largest circle: " in capsys.readouterr().out
