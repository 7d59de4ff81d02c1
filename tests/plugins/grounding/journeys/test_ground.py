"""Finding masks by text: queries, training, evaluation and `ask`."""

import json
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import cv2
import pytest

from gigamask.cli.main import main as command
from gigamask.data import index as indexes
from gigamask.data.image import decode
from gigamask.data.shards import ShardReader
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.serialization import read_json
from gigamask.training import checkpoint
from tests import little
from tests.plugins.grounding import asked

FEW = (
    "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
).split()


def main(words: list[str]) -> int:
    """Run a command; the recipe of most runs here is not built in."""
    trusted = words[:1] == ["ask"] or words[:2] == ["ground", "evaluate"]
    return command([*words, *(["--trust"] if trusted else [])])


def ground(described: Path, out: Path, *words: object) -> int:
    return main(["ground", "train", asked.RECIPE, *asked.flags(described, out), *map(str, words)])


@pytest.fixture(scope="module")
def run(described, tmp_path_factory) -> Path:
    """A run of four updates, in which half of the images are held out."""
    out = tmp_path_factory.mktemp("ground") / "run"
    assert ground(described, out, "--val-split", "0.5") == 0
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
    assert main("ground synth scenes --images 4".split()) == 0
    assert "scenes/queries.jsonl" in capsys.readouterr().out
    words = (
        "ground train ground_tiny --data scenes --queries scenes/queries.jsonl --segmenter "
        f"{described}/segmenter.safetensors --out runs/words --steps 2 --batch-size 4 "
        "--micro-batch-size 4 --model.embedding-dim 16 --model.dim 16 --val-split 0.6 --device cpu"
    )
    assert main(words.split()) == 0
    assert capsys.readouterr().out.endswith(
        'next: gigamask ask runs/words IMAGE "WORDS", or gigamask ground evaluate runs/words '
        "--calibrate\n"
    )
    assert main(["ground", "evaluate", "runs/words"]) == 0
    assert " nonsense" in capsys.readouterr().out.splitlines()[-1]
    asked = ["ask", "runs/words", "scenes/sa_000000.tar:0", "the red disc", "zxqv blorp 7"]
    assert main([*asked, "--json", "told.json"]) == 0
    said, note = capsys.readouterr().out, "no word of it is in the training queries: zxqv, blorp, 7"
    assert said.count("the red disc: ") == said.count(note) == 1
    told = read_json("told.json")
    assert told["answers"][1]["note"] == note


def test_a_run_is_scored_on_what_it_held_out(run, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main(f"ground evaluate {run} --json {told} --calibrate --device cpu".split()) == 0
    printed, summary = capsys.readouterr().out, read_json(told)
    assert f"{summary['queries']} queries about {summary['images']} images" in printed
    assert str(run / "confidence.json") in printed
    assert 0 < summary["images"] < 6
    assert set(summary["rules"]) == {"chance", "largest", "prior"}
    assert {"segmenter", "data", "query_files", "protocol", "skipped"} < summary.keys()
    assert (summary["val_split"], summary["weights"], summary["run"]) == (0.5, str(run), str(run))
    assert asdict(Confidence.load(str(run))) == summary["confidence"]
    assert main(f"ground evaluate {checkpoint.newest(run)} --json {told}".split()) == 0
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
    words = (f"--data {tmp_path}/other --queries {tmp_path}/few.jsonl --json {told}").split()
    assert main(["ground", "evaluate", str(run), *words]) == 0
    summary = read_json(told)
    assert (summary["query_files"], summary["val_split"], summary["data"]) == (
        [str(tmp_path / "few.jsonl")],
        0.0,
        [str(tmp_path / "other")],
    )
    assert "5 queries about 1 image" in capsys.readouterr().out
    moved = tmp_path / "moved.safetensors"
    shutil.copy(described / "segmenter.safetensors", moved)
    assert main(["ground", "evaluate", str(run), *words, "--segmenter", str(moved)]) == 0
    assert read_json(told)["segmenter"] == str(moved)


def test_query_an_image_a_tar_and_an_image_with_annotation(
    run, described, picture, tmp_path, capsys
):
    told, drawn = tmp_path / "told.json", tmp_path / "drawn"
    texts = ["the red disc", "the large blue box left of the small ring"]
    ask, top = ["ask", str(run)], f"--json {told} --top 2".split()
    scene = f"{described}/scenes/sa_000000.tar:0"
    assert main([*ask, scene, *texts, *top, "--pictures", str(drawn)]) == 0
    printed, answers = capsys.readouterr().out, read_json(told)["answers"]
    assert [each["text"] for each in answers] == texts
    masks = len(read_json(picture.with_suffix(".json"))["annotations"])
    shown = decode(picture.read_bytes(), "photo")
    for number, each in enumerate(answers):
        first, second = each["best"]
        assert each["candidates"] == masks
        assert first["confidence"] >= second["confidence"]
        assert f"mask {first['mask']}: confidence {first['confidence']:.3f}, x " in printed
        height, width = cv2.imread(str(drawn / f"{number}.png")).shape[:2]
        assert (height - shown.shape[0] >= 24, width) == (True, shown.shape[1]), "a caption below"
    annotation = str(picture.with_suffix(".json"))
    assert main([*ask, str(picture), *texts, "--annotation", annotation, *top]) == 0
    assert [each["best"] for each in read_json(told)["answers"]] == [
        each["best"] for each in answers
    ]
    words = ["ask", str(checkpoint.newest(run)), str(picture), texts[0], *FEW, *top]
    assert main(words) == 0
    [found] = read_json(told)["answers"]
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
        assert main(["ask", str(run), str(image), "red", *FEW]) == 0
        assert "red: " in capsys.readouterr().out


def test_parts_are_chosen_by_name(described, tmp_path):
    parts = (
        "--sampler relevance_diversity --text.lora-rank 2 --optimizer muon --precision bf16"
    ).split()
    run = tmp_path / "run"
    assert ground(described, run, "--steps", 2, *parts) == 0
    assert main(["ask", str(run), f"{described}/scenes/sa_000000.tar:1", "the box"]) == 0


def test_help_is_there(capsys):
    for words, message in (
        ("ground", "usage: gigamask ground train RECIPE --segmenter WEIGHTS"),
        ("ground --help", "gigamask ground evaluate RUN [--data PATH... --queries FILE...]"),
        ("ground train --help", "ground_tiny"),
        ("ground evaluate --help", "--calibrate"),
        ("ground train ground_tiny --help", "--segmenter"),
        ("ask --help", "--annotation"),
    ):
        with suppress(SystemExit):
            assert main(words.split()) == 0
        assert message in capsys.readouterr().out, words


def refused(capsys, words, message):
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2, words
    said = capsys.readouterr().err
    assert message.lower() in said.lower(), said
    assert said.count("\n") == 1, said


def test_invalid_training_flags_are_a_one_line_error(described, run, tmp_path, capsys):
    flags, out = asked.flags(described, tmp_path / "run"), tmp_path / "run"
    train = ["ground", "train", asked.RECIPE]
    for words, message in (
        ([*train, *flags, "--segmenter", run], str(run)),
        ([*train, *flags, "--model.embedding-dim", "64"], "--model.embedding-dim is 64"),
        ([*train, *flags, "--text.name", tmp_path / "gone"], "gone"),
        (["ground", "train", "tiny"], "recipe tiny is for 'gigamask train', not"),
        (["train", asked.RECIPE, *flags], "is for 'gigamask ground train', not"),
        (["ground", "train"], "needs a recipe (ground, ground_tiny, or file.py:function)"),
        (["ground", "train", "--resume", tmp_path / "gone"], "no such folder"),
        (["ground", "train", "--resume", run, "--max-masks", "3"], "--max-masks was"),
        (["ground", "test"], "'ground test'"),
    ):
        refused(capsys, words, message)
        assert not (out / "checkpoints").exists(), words
    assert main(f"ground train --resume {run} --max-masks 5 --allow-data-change".split()) == 0


def test_invalid_evaluation_flags_are_a_one_line_error(described, run, tmp_path, capsys):
    evaluate, plain, segmented = ["ground", "evaluate"], tmp_path / "plain", tmp_path / "tiny"
    words = f"train {little.__file__}:little --data {described}/scenes --steps 1 --out"
    assert main([*words.split(), str(segmented)]) == 0
    assert ground(described, plain, "--steps", 1) == 0
    for words, message in (
        ([*evaluate], "missing"),
        ([*evaluate, segmented], f"{segmented}: "),
        ([*evaluate, plain], "--data PATH... --queries FILE..."),
        ([*evaluate, run, "--data", described / "scenes"], "--data and --queries"),
        (["ask", segmented, tmp_path / "x.jpg", "red"], f"{segmented}: "),
    ):
        refused(capsys, words, message)


@pytest.mark.long
def test_invalid_input_is_a_one_line_error(described, run, picture, tmp_path, capsys):
    first = f"{described}/scenes/sa_000000.tar:0"
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
        (["ask"], "missing"),
        (["ask", run, first], "TEXT"),
        (["ask", run, first, "red", "--top", "0"], "--top"),
        (["ask", run, tmp_path, "red"], f"{tmp_path}: is a folder"),
        (["ask", run, f"{described}/scenes/sa_000000.tar:77", "red"], "77"),
        (["ask", run, described / "scenes" / "sa_000000.tar", "red"], "sa_000000.tar:sa_1"),
        (["ask", run, picture, "red", "--annotation", tmp_path / "gone.json"], "gone.json: "),
        (["ask", run, picture, "red", "--annotation", tmp_path / "small.json"], "2 x 3"),
        (["ask", run, picture, "red", "--annotation", tmp_path / "no.json"], "no.json: its json"),
        (["ask", run, picture, "red", "--annotation", tmp_path / "none.json"], "none.json: "),
        (
            ["ask", run, picture, *"red --points-per-side 2 --pred-iou-thresh 1".split()],
            "--pred-iou-thresh",
        ),
        (["ask", empty, first, "red"], f"{empty}: "),
        (["ask", run / "checkpoints", first, "red"], f"pass {run}"),
    ):
        refused(capsys, words, message)
