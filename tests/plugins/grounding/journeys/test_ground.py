"""Finding masks by text: queries, training, interrupt and resume, evaluation and `ask`."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import cv2
import pytest

from gigamask import cli
from gigamask.cli.main import INTERRUPTED
from gigamask.data import index as indexes
from gigamask.data.image import decode
from gigamask.data.shards import ShardReader
from gigamask.plugins.grounding.calibration import Confidence
from gigamask.training import checkpoint
from tests import little
from tests.journeys.runs import same
from tests.plugins.grounding import asked

FEW = (
    "--points-per-side 4 --pred-iou-thresh 0 --stability-score-thresh 0 --box-nms-thresh 0.95"
).split()


def main(words: list[str]) -> int:
    """Run a command; the recipe of most runs here is not built in."""
    trusted = words[:1] == ["ask"] or words[:2] == ["ground", "evaluate"]
    return cli.main.main([*words, *(["--trust"] if trusted else [])])


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
    given = (
        "--data scenes --queries scenes/queries.jsonl --segmenter "
        f"{described}/segmenter.safetensors --out runs/words"
    ).split()
    few = (
        "--steps 2 --batch-size 4 --micro-batch-size 4 "
        "--model.embedding-dim 16 --model.dim 16 --val-split 0.6 --device "
        "cpu"
    ).split()
    assert main(["ground", "train", "ground_tiny", *given, *few, "--json", "told.json"]) == 0
    told = json.loads(Path("told.json").read_text())
    assert (told["step"], told["samples"]) == (2, 8)
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
    told = json.loads(Path("told.json").read_text())
    assert told["answers"][1]["note"] == note


def test_a_run_is_scored_on_what_it_held_out(run, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main(f"ground evaluate {run} --json {told} --calibrate --device cpu".split()) == 0
    printed, summary = capsys.readouterr().out, json.loads(told.read_text())
    assert f"{summary['queries']} queries about {summary['images']} images" in printed
    assert str(run / "confidence.json") in printed
    assert 0 < summary["images"] < 6
    assert set(summary["rules"]) == {"chance", "largest", "prior"}
    assert {
        "weights",
        "segmenter",
        "data",
        "query_files",
        "val_split",
        "protocol",
        "confidence",
        "calibration",
        "skipped",
    } < summary.keys()
    assert (summary["val_split"], summary["weights"], summary["run"]) == (0.5, str(run), str(run))
    assert asdict(Confidence.load(str(run))) == summary["confidence"]
    assert (
        main(
            [
                "ground",
                "evaluate",
                str(checkpoint.newest(run)),
                "--json",
                str(tmp_path / "again.json"),
            ]
        )
        == 0
    )
    again = json.loads((tmp_path / "again.json").read_text())
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
    summary = json.loads(told.read_text())
    assert (summary["query_files"], summary["val_split"], summary["data"]) == (
        [str(tmp_path / "few.jsonl")],
        0.0,
        [str(tmp_path / "other")],
    )
    assert "5 queries about 1 image" in capsys.readouterr().out
    moved = tmp_path / "moved.safetensors"
    shutil.copy(described / "segmenter.safetensors", moved)
    assert main(["ground", "evaluate", str(run), *words, "--segmenter", str(moved)]) == 0
    assert json.loads(told.read_text())["segmenter"] == str(moved)


def test_query_an_image_a_tar_and_an_image_with_annotation(
    run, described, picture, tmp_path, capsys
):
    told, drawn = tmp_path / "told.json", tmp_path / "drawn"
    texts = ["the red disc", "the large blue box left of the small ring"]
    assert (
        main(
            [
                "ask",
                str(run),
                f"{described}/scenes/sa_000000.tar:0",
                *texts,
                *f"--json {told} --pictures {drawn} --top 2".split(),
            ]
        )
        == 0
    )
    printed, answers = capsys.readouterr().out, json.loads(told.read_text())["answers"]
    assert [each["text"] for each in answers] == texts
    masks = len(json.loads(picture.with_suffix(".json").read_text())["annotations"])
    shown = decode(picture.read_bytes(), "photo")
    for number, each in enumerate(answers):
        assert each["candidates"] == masks
        assert len(each["best"]) == 2
        assert each["best"][0]["confidence"] >= each["best"][1]["confidence"]
        assert f"{each['text']}: " in printed
        assert (
            f"mask {each['best'][0]['mask']}: confidence {each['best'][0]['confidence']:.3f}, x "
            in printed
        )
        height, width = cv2.imread(str(drawn / f"{number}.png")).shape[:2]
        assert (height - shown.shape[0] >= 24, width) == (True, shown.shape[1]), "a caption below"
    assert (
        main(
            [
                "ask",
                str(run),
                str(picture),
                *texts,
                "--annotation",
                str(picture.with_suffix(".json")),
                "--json",
                str(told),
                "--top",
                "2",
            ]
        )
        == 0
    )
    assert [each["best"] for each in json.loads(told.read_text())["answers"]] == [
        each["best"] for each in answers
    ]
    assert (
        main(
            ["ask", str(checkpoint.newest(run)), str(picture), texts[0], *FEW, "--json", str(told)]
        )
        == 0
    )
    [found] = json.loads(told.read_text())["answers"]
    assert found["candidates"] > 1
    height, width = shown.shape[:2]
    assert all(
        0 <= x0 <= x1 < width and 0 <= y0 <= y1 < height
        for x0, y0, x1, y1 in (each["box"] for each in found["best"])
    )


def test_a_png_and_an_image_without_a_json(run, picture, tmp_path, capsys):
    from gigamask.data import tar

    pixels = decode(picture.read_bytes(), "photo")
    cv2.imwrite(str(tmp_path / "photo.png"), pixels[..., ::-1])
    tar.write(tmp_path / "bare.tar", [("sa_5.jpg", picture.read_bytes())])
    for image in (tmp_path / "photo.png", f"{tmp_path}/bare.tar:5"):
        assert main(["ask", str(run), str(image), "red", *FEW]) == 0
        assert "red: " in capsys.readouterr().out


def test_interrupted_and_resumed(described, tmp_path, capfd):
    """In a process of its own, which need not start Python anew."""
    out = tmp_path / "run"
    words = [
        "ground",
        "train",
        asked.RECIPE,
        *asked.flags(described, out),
        "--steps",
        "100000",
        "--save-every",
        "100000",
    ]
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(main(words)))
    process.start()
    try:
        deadline = time.monotonic() + 60
        while (
            not ((out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size)
            and process.is_alive()
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
        assert process.exitcode == INTERRUPTED
    finally:
        process.kill()
    assert f"gigamask ground train --resume {out}" in capfd.readouterr().out
    step = int(checkpoint.newest(out).name.removeprefix("step_"))
    assert 0 < step < 100000
    assert main([*words, "--steps", str(step + 2)]) == 0
    assert f"--steps: changed from 100000 to {step + 2}" in capfd.readouterr().out
    assert checkpoint.newest(out).name == f"step_{step + 2:08d}"


def test_the_same_command_goes_on_bit_for_bit(described, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    given = ("--val-split 0.4 --evaluation.interval 2 --sampler curriculum --mining ohem").split()
    assert ground(described, out, "--steps", 4, *given) == 0
    shutil.copytree(out, whole, symlinks=True)
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    assert ground(described, out, "--steps", 4, *given) == 0
    assert same(whole, out)
    evaluated = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert any("answered" in json.dumps(line) for line in evaluated)
    assert (out / "checkpoints" / "best").exists()


def test_parts_are_chosen_by_name(described, tmp_path):
    parts = (
        "--sampler relevance_diversity --text.lora-rank 2 --optimizer muon --precision bf16"
    ).split()
    assert ground(described, tmp_path / "run", "--steps", 2, *parts) == 0
    assert (
        main(["ask", str(tmp_path / "run"), f"{described}/scenes/sa_000000.tar:1", "the box"]) == 0
    )


def test_help_is_there(capsys):
    for words, message in (
        (
            ["ground"],
            "usage: gigamask ground train RECIPE --segmenter WEIGHTS --data PATH... --queries "
            "FILE...",
        ),
        (
            ["ground", "--help"],
            "gigamask ground evaluate RUN [--data PATH... --queries FILE...] [--calibrate]",
        ),
        (["ground", "train", "--help"], "ground_tiny"),
        (["ground", "evaluate", "--help"], "--calibrate"),
        ("ground train ground_tiny --help".split(), "--segmenter"),
        (["ask", "--help"], "--annotation"),
    ):
        with suppress(SystemExit):
            assert main(words) == 0
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
    (tmp_path / "strange.jsonl").write_text(
        '{"image": "sa_99.jpg", "query": "the red box", "mask_index": 0}\n'
    )
    for words, message in (
        ([*train, *flags[:2], *flags[4:]], "--queries"),
        ([*train, *flags[:4], *flags[6:]], "--segmenter"),
        ([*train, *flags, "--queries", tmp_path / "gone.jsonl"], "gone.jsonl: "),
        (
            [*train, *flags, "--queries", tmp_path / "strange.jsonl"],
            "has no such image",
        ),
        ([*train, *flags, "--segmenter", tmp_path / "gone.pth"], "gone.pth: "),
        ([*train, *flags, "--segmenter", run], str(run)),
        ([*train, *flags, "--model.embedding-dim", "64"], "--model.embedding-dim is 64"),
        ([*train, *flags, "--text.name", tmp_path / "gone"], "gone"),
        ([*train, *flags, "--val-split", "1e-9"], "--val-split 1e-09"),
        (
            ["ground", "train", "tiny", "--data", described / "scenes", "--out", out],
            "recipe tiny is for 'gigamask train', not 'gigamask ground train'",
        ),
        (
            ["train", asked.RECIPE, *flags],
            "is for 'gigamask ground train', not 'gigamask train'",
        ),
        (
            ["ground", "train"],
            "ground train needs a recipe (ground, ground_tiny, or file.py:function) or --resume "
            "RUN",
        ),
        (["ground", "train", "--resume", tmp_path / "gone"], "no such folder"),
        (["ground", "test"], "'ground test'"),
    ):
        refused(capsys, words, message)
        assert not (out / "checkpoints").exists(), words
    for words, name in (
        (["--max-masks", "3"], "max-masks"),
        (["--segmenter", run], "segmenter"),
        (["--text.max-tokens", "23"], "text.max-tokens"),
    ):
        given = ["ground", "train", "--resume", run, "--steps", "9", *words]
        refused(capsys, given, f"--{name} was")
    assert main(f"ground train --resume {run} --max-masks 5 --allow-data-change".split()) == 0


def test_invalid_evaluation_flags_are_a_one_line_error(described, run, tmp_path, capsys):
    evaluate, plain = ["ground", "evaluate"], tmp_path / "plain"
    segmented = tmp_path / "tiny"
    assert (
        main(
            (
                f"train {little.__file__}:little --data {described}/scenes --out "
                f"{segmented} --steps 1"
            ).split()
        )
        == 0
    )
    assert ground(described, plain, "--steps", 1) == 0
    for words, message in (
        ([*evaluate], "missing"),
        ([*evaluate, tmp_path / "gone"], "no such folder"),
        ([*evaluate, segmented], f"{segmented}: "),
        ([*evaluate, plain], "--data PATH... --queries FILE..."),
        ([*evaluate, run, "--data", described / "scenes"], "--data and --queries"),
        (
            [*evaluate, run, "--queries", described / "scenes" / "queries.jsonl"],
            "--data and --queries",
        ),
        ([*evaluate, run, "--segmenter", tmp_path / "gone.pth"], "gone.pth"),
        ([*evaluate, run, "--calibrat"], "perhaps you meant --calibrate"),
        ([*evaluate, run, "--json", tmp_path / "no" / "told.json"], "cannot be written"),
        (["ask", segmented, tmp_path / "x.jpg", "red"], f"{segmented}: "),
    ):
        refused(capsys, words, message)


@pytest.mark.long
def test_invalid_input_is_a_one_line_error(described, run, picture, tmp_path, capsys):
    first = f"{described}/scenes/sa_000000.tar:0"
    small = json.loads(picture.with_suffix(".json").read_text())
    (tmp_path / "none.json").write_text(json.dumps({**small, "annotations": []}))
    small["image"] |= {"width": 3, "height": 2}
    small["annotations"] = [
        {**small["annotations"][0], "segmentation": {"size": [2, 3], "counts": [0, 6]}}
    ]
    (tmp_path / "small.json").write_text(json.dumps(small))
    (tmp_path / "no.jpg").write_text("no picture")
    (tmp_path / "no.json").write_text("{")
    empty = tmp_path / "empty"
    shutil.copytree(run, empty)
    shutil.rmtree(empty / "checkpoints")
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    (cut / "confidence.json").write_text("{")
    for words, message in (
        (["ask"], "missing"),
        (["ask", run, first], "TEXT"),
        (["ask", run, first, " "], "' '"),
        (["ask", run, first, "red", "!!!"], "'!!!'"),
        (["ask", run, first, "red", "--top", "0"], "--top"),
        (["ask", run, tmp_path / "gone.jpg", "red"], "gone.jpg: "),
        (["ask", run, tmp_path, "red"], f"{tmp_path}: is a folder"),
        (["ask", run, f"{described}/scenes/sa_000000.tar:77", "red"], "77"),
        (["ask", run, f"{tmp_path}/gone.tar:0", "red"], "gone.tar"),
        (["ask", run, described / "scenes" / "sa_000000.tar", "red"], "sa_000000.tar:sa_1"),
        (
            ["ask", run, tmp_path / "no.jpg", "red"],
            "no.jpg: the 10 bytes are not a valid JPEG",
        ),
        (
            ["ask", run, picture, "red", "--annotation", tmp_path / "gone.json"],
            "gone.json: ",
        ),
        (["ask", run, picture, "red", "--annotation", tmp_path / "small.json"], "2 x 3"),
        (
            ["ask", run, picture, "red", "--annotation", tmp_path / "no.json"],
            "no.json: its json of 1 bytes is not an SA-1B annotation",
        ),
        (["ask", run, picture, "red", "--annotation", tmp_path / "none.json"], "none.json: "),
        (
            ["ask", run, picture, *"red --points-per-side 2 --pred-iou-thresh 1".split()],
            "--pred-iou-thresh",
        ),
        (
            ["ask", run, picture, "red", "--points-per-side", "0"],
            "--points-per-side must be at least 1 (got 0)",
        ),
        (["ask", empty, first, "red"], f"{empty}: "),
        (["ask", cut, first, "red"], "confidence.json: "),
        (["ask", run, first, "red", "--segmenter", tmp_path / "gone.pth"], "gone.pth"),
        (["ask", tmp_path / "gone", first, "red"], "no such folder"),
        (["ask", run / "checkpoints", first, "red"], f"pass {run}"),
    ):
        refused(capsys, words, message)
