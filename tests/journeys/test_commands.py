"""Each command as a user types it, on synthetic scenes: output, files and exit code."""

import csv
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from gigamask.cli.commands.synth import SynthCommand
from gigamask.cli.main import INTERRUPTED
from gigamask.data import index as indexes
from gigamask.serialization import read_json
from gigamask.synthetic.scenes import LONG_SIDE
from gigamask.training.logging import MetricsLogger
from gigamask.workflows import demo
from tests.commands import LITTLE, exit_code, invoke, refusal
from tests.html import Page
from tests.journeys.runs import records
from tests.journeys.scores import alike


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory) -> Path:
    """A run of four steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    invoke(f"train {LITTLE} --data {scenes} --out {out} --json {out.parent}/train.json")
    return out


def test_scenes_have_the_requested_size_and_one_is_singular(tmp_path, capsys):
    synth = f"synth {tmp_path}/scenes --images 2 --long-side"
    invoke(synth, "90 100")
    assert "2 scenes in 1 tar in" in capsys.readouterr().out
    index = indexes.build(tmp_path / "scenes", tmp_path / "index")
    sizes = np.maximum(index.images["width"], index.images["height"])
    assert ((sizes >= 90) & (sizes <= 100)).all()
    invoke(f"index {tmp_path}/scenes --out {tmp_path}/again")
    assert " masks in 1 tar (1 scanned, 0 reused)" in capsys.readouterr().out
    invoke(f"stats {tmp_path}/index")
    first, found, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"stats {tmp_path}/index: describe tars or an index")
    assert found.startswith("2 images with ")
    assert SynthCommand("x").long_side == LONG_SIDE
    for sides in ("31 100", "100 90", "90 8193"):
        line = refusal(capsys, synth, sides)
        assert f"32 to 8192, the smaller first (got {sides})" in line


def test_synth_index_stats(tmp_path, capsys):
    invoke(f"synth {tmp_path}/scenes --images 5 --seed 3 --json {tmp_path}/synth.json")
    assert read_json(tmp_path / "synth.json")["images"] == 5
    invoke(f"index {tmp_path}/scenes --out {tmp_path}/index --json {tmp_path}/index.json")
    report = read_json(tmp_path / "index.json")
    assert report["images"] == 5
    assert report["masks"] > 10
    capsys.readouterr()
    invoke(f"stats {tmp_path}/index --json {tmp_path}/stats.json")
    assert "masks" in capsys.readouterr().out
    stats = read_json(tmp_path / "stats.json")
    invoke(f"stats {tmp_path}/scenes/*.tar --json {tmp_path}/again.json")
    assert read_json(tmp_path / "again.json") == stats


def test_a_copied_run_resumes_in_its_new_folder(trained, tmp_path, capsys):
    copied, before = tmp_path / "copied", (trained / "metrics.jsonl").read_bytes()
    shutil.copytree(trained, copied)
    invoke(f"train --resume {copied} --steps 5")
    assert f"--out: changed from {trained} to {copied}" in capsys.readouterr().out
    assert (trained / "metrics.jsonl").read_bytes() == before
    assert json.loads((copied / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 5


def test_train_writes_a_run(trained):
    done = {"run": str(trained), "step": 4, "samples": 12, "steps": 4}
    assert read_json(trained.parent / "train.json") == done
    told = records(trained)
    assert [record["step"] for record in told] == [1, 2, 3, 4]
    names = "loss focal dice iou_head iou lr grad_norm images_per_s data_time_s memory_gb"
    assert {*names.split()} <= told[0].keys()
    assert (trained / "config.yaml").exists()
    assert list((trained / "tensorboard").iterdir())
    saved = sorted(path.name for path in (trained / "checkpoints").iterdir())
    assert saved == ["step_00000002", "step_00000004"]


def test_the_same_command_and_resume_continue(trained, tmp_path, scenes, capsys):
    out = tmp_path / "run"
    command = f"train {LITTLE} --data {scenes} --out {out}"
    invoke(command, "--steps 2")
    invoke(command, "--steps 3 --init other")
    said = capsys.readouterr().out
    assert "--steps: changed from 2 to 3\n" in said
    assert "--init: changed from None to other, without effect: the checkpoint has" in said
    invoke(f"train --resume {out} --steps 4")
    assert [record["step"] for record in records(out)] == [1, 2, 3, 4]
    assert "finished" not in capsys.readouterr().out
    invoke(f"train --resume {out}")
    printed = capsys.readouterr().out
    assert f"the training is finished, in {out}/checkpoints/step_00000004" in printed
    assert f"gigamask train --resume {out} --steps 8" in printed
    assert f"next: gigamask evaluate {out}" in printed
    before = (out / "config.yaml").read_text()
    invoke(f"train --resume {out} --steps 3")
    assert (out / "config.yaml").read_text() == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["scenes", "photographs"])
def test_photos_trains_and_is_scored(kind, scenes, tmp_path, request):
    train_on, test_on = scenes, scenes
    if kind == "photographs":
        real_data = request.getfixturevalue("real_data")
        train_on, test_on = real_data / "bsds_train", real_data / "bsds_val"
    run, told = tmp_path / "photos", tmp_path / "scores.json"
    few = "--steps 1 --batch-size 2 --loader.max-masks 2"
    invoke(f"train photos --data {train_on} --out {run}", few)
    invoke(f"evaluate {run} --data {test_on} --max-images 1 --min-predicted-iou 0.75 --json {told}")
    assert read_json(told)["masks"] > 0


def test_evaluate_writes_scores_and_figures(trained, scenes, tmp_path, capsys):
    figures = tmp_path / "figures"
    scored = f"evaluate {trained} --data {scenes} --max-images 3 --pictures {figures}"
    invoke(
        scored,
        f"--json {tmp_path}/scores.json --boundaries --automatic --points-per-side 4",
        f"--html {tmp_path}/scores.html --table {tmp_path}/masks.csv",
    )
    assert (tmp_path / "scores.html").read_text().count("<img") == 3
    scores = read_json(tmp_path / "scores.json")
    assert scores["images"] == 3
    with open(tmp_path / "masks.csv", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == scores["masks"]
    mean = np.mean([float(row["clicks_3"]) for row in rows])
    assert mean == pytest.approx(scores["clicks"]["3"])
    assert list(scores["clicks"]) == ["1", "2", "3", "5", "9"]
    assert all(
        0 <= value <= 1 for value in [*scores["clicks"].values(), scores["oracle"], scores["box"]]
    )
    assert scores["oracle"] >= scores["clicks"]["1"]
    assert scores["protocol"]["feed_mask"] is True
    assert "times the scale" in scores["protocol"]["point_convention"]
    assert sum(each["masks"] for each in scores["size"].values()) == scores["masks"]
    assert scores["calibration"]["masks"] == scores["automatic"]["truth"] == scores["masks"]
    assert set(scores["boundary_f"]) == set(scores["clicks"])
    printed = capsys.readouterr().out
    assert all(
        words in printed
        for words in ("1 click", "Boundary IoU:", "from 4 points per side", "AR@1000")
    )
    for name in ("best", "worst", "typical"):
        assert cv2.imread(str(figures / f"{name}.png")).shape[0] > 200
    checkpoint = sorted((trained / "checkpoints").iterdir())[-1]
    for weights in (checkpoint, checkpoint / "model.safetensors"):
        invoke(f"evaluate {weights} --data {scenes} --max-images 3 --json {tmp_path}/again.json")
        again = read_json(tmp_path / "again.json")
        assert alike(
            {name: again[name] for name in ("clicks", "box")},
            {name: scores[name] for name in ("clicks", "box")},
        )


def test_follow_prints_the_nine_steps(scenes, capsys):
    invoke(f"follow {scenes}/sa_000000.tar:sa_3 --recipe {LITTLE}")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()] == [
        str(step) for step in range(1, 10)
    ]


@pytest.mark.long
def test_an_interrupted_demo_says_so_goes_on_and_leaves_its_report(tmp_path, monkeypatch, capsys):
    out = tmp_path / "demo"
    words = f"demo --out {out} --train-images 4 --test-images 2 --steps 3"
    log_step = MetricsLogger.log_step

    def interrupt(self, step, *given):
        log_step(self, step, *given)
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(demo, "EVALUATIONS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLogger, "log_step", interrupt)
        assert exit_code(words) == INTERRUPTED
    assert "interrupted and saved at step 2 of 3; run the same command" in capsys.readouterr().err
    assert not (out / "evaluation.json").exists()
    invoke(words)
    scores = read_json(out / "evaluation.json")
    assert (scores["step"], scores["images"]) == (3, 2)
    assert cv2.imread(str(out / "report.png")) is not None
    told = capsys.readouterr().out
    assert "--init starter" in told
    page = Page((out / "report.html").read_text())
    assert page.row("demo, evaluation.json")[-1].endswith(" masks on 2 images")
    assert {"Answers", "What next", "Worst", "Typical"} <= set(page.text)
    assert any(text.startswith(f"gigamask follow {out}/test/") for text in page.text)
    assert f"; see {out / 'report.html'}, " in told


def test_overviews(capsys):
    invoke()
    invoke("--help")
    invoke("train --help")
    assert "sam_vit_h" in capsys.readouterr().out
    invoke("train sam_vit_h --data x --print-config")
    assert "  layer-decay: 0.8" in capsys.readouterr().out
    invoke("--version")


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, scenes, trained, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "text.pth").write_text("no weights")
    bare = tmp_path / "bare.tar"
    with tarfile.open(bare, "w") as file:
        file.addfile(tarfile.TarInfo("readme.txt"), io.BytesIO())
    whole = next(scenes.glob("*.tar")).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) // 2])
    train = f"train {LITTLE} --out {tmp_path}/run"
    scored = f"evaluate {trained} --data {scenes}"
    cases = {
        f"index {empty} --out x": "contains no .tar file",
        f"index {bare} --out {tmp_path}/i": "bare.tar",
        f"index {tmp_path}/cut.tar --out {tmp_path}/i": "cut.tar: member",
        "stats": "no path was given",
        f"synth {bare} --images 1": "bare.tar: cannot be a folder of tars",
        train: "--data is required",
        f"{train} --data {scenes} --loader.filters.min-predicted-iou 1": "none of 12 images has",
        f"train --resume={empty}": "not a run folder (no config.yaml)",
        f"train --resume {trained} --model.embed-dim 32": "weights of another shape",
        f"evaluate {tmp_path}/gone.pth --data {scenes}": "gone.pth",
        f"evaluate {trained}": "data",
        f"{scored} --device gpu": "--device must be auto, cpu, cuda, cuda:N or mps (got 'gpu')",
        f"{scored} --html {tmp_path}/none/x.html": "x.html: cannot be written",
        f"demo --out {tmp_path}/demo --steps 0": "--steps must be at least 1",
        "follow sa_1": "TAR:IMAGE",
        f"follow {scenes}/sa_000000.tar:sa_99": "has no image 'sa_99'",
        "fly": "'fly'; choose one of convert, synth,",
        f"index {scenes} --num-workers 2": "--num-workers; perhaps you meant --workers",
        "synth '' --images 1": "argument 2 is empty",
        f"verify {scenes} --checksums=": "--checksums= is empty",
    }
    wrong = []
    for words, message in cases.items():
        code = exit_code(words, "--progress none")
        lines = capsys.readouterr().err.strip().splitlines()
        if (code, len(lines)) != (2, 1) or not re.match(
            f"gigamask: .*{re.escape(message)}", lines[0]
        ):
            wrong.append((words, message, code, lines))
    assert not wrong, "\n".join(map(str, wrong))


def test_installed_command_prints_help_without_torch():
    done = subprocess.run(
        [Path(sys.executable).parent / "gigamask", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "usage: gigamask COMMAND" in done.stdout
