"""What a run folder shows of runs that finished, were killed, or are still running, and of folders
that are no runs.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gigamask.report import history
from gigamask.serialization import with_checksum
from tests.errors import error_line


def record(step: int, loss: float = 0.5, **more) -> dict:
    return {"step": step, "loss": loss, "images_per_s": 10.0, "data_time_s": 0.1, **more}


def written(
    folder: Path,
    *events: dict,
    config: str = "recipe: tiny\nsteps: '40'\nbatch-size: '4'\ndata:\n- a.tar\n",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def checkpoint(folder: Path, step: int, **more) -> Path:
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "model").write_bytes(b"weights")
    told = {
        "format": 2,
        "step": step,
        "samples": 4 * step,
        "files": {"model": {"bytes": 7, "crc32": 449999704}},
        "ledger": None,
        "scale": None,
    }
    (path / "manifest.json").write_bytes(with_checksum(told | more))
    return path


def test_a_run_that_went_through(tmp_path):
    run = history.read(
        written(
            tmp_path / "run",
            {"step": 0, "started": "2026-01-02T03:04:05+00:00", "device": "cpu", "processes": 1},
            record(10, 1.0, loss_scale=2.0),
            {
                "step": 10,
                "evaluation": {"box": 0.5, "wrong image": float("nan")},
                "warnings": ["oh"],
                "seconds": 1.5,
                "of": "7 masks on 2 images",
                "subject": "box of 7",
                "standard_error": {"box": 0.04, "wrong image": "?"},
            },
            record(20, float("nan")),
            {"step": 15, "half": True},
        )
    )
    assert run.records["step"] == [10, 20]
    assert run.records["loss"] == [1.0, None]
    assert run.records["loss_scale"] == [2.0, None]
    assert run.evaluations == [
        {
            "step": 10,
            "scores": {"box": 0.5, "wrong image": None},
            "standard_error": {"box": 0.04, "wrong image": None},
            "of": "7 masks on 2 images",
            "subject": "box of 7",
            "warnings": ["oh"],
            "seconds": 1.5,
        }
    ]
    assert run.starts == [{"step": 0, "time": "2026-01-02T03:04:05+00:00", "device": "cpu"}]
    assert not any(run.faults.values())
    assert (run.step, run.steps, run.invalid_lines, run.empty) == (20, 40, 0, False)
    assert run.config["data"] == ["a.tar"]
    assert json.loads(json.dumps(run.to_dict()))["folder"] == str(tmp_path / "run")


def test_what_was_trained_twice_counts_as_it_was_trained_last(tmp_path):
    """Killed behind step 30, begun again at the checkpoint of step 15; its evaluation of step 20
    and the skipped step 18 come again."""
    lines = [
        record(10),
        {"step": 10, "evaluation": {"box": 0.1}},
        {"step": 18, "skipped_step": "a"},
        record(20, 1.0),
        {"step": 20, "evaluation": {"box": 0.2}},
    ]
    again = [
        {"step": 18, "skipped_step": "a"},
        record(20, 2.0),
        {"step": 20, "evaluation": {"box": 0.3}},
    ]
    start = {
        "step": 15,
        "started": "2026-01-02T03:04:05+00:00",
        "device": "cpu",
        "corrupt_checkpoints": ["step_00000025"],
    }
    run = history.read(written(tmp_path / "run", *lines, record(30, 1.0), start, *again))
    assert (run.records["step"], run.records["loss"]) == ([10, 20], [0.5, 2.0])
    assert [each["scores"]["box"] for each in run.evaluations] == [0.1, 0.3]
    assert len(run.faults["skipped_step"]) == 1
    assert run.faults["resumed"] == [{"step": 15, "time": start["started"], "reached": 30}]
    assert run.faults["corrupt_checkpoints"] == [{"step": 15, "checkpoint": "step_00000025"}]


def test_decreasing_steps_reveal_an_unrecorded_restart(tmp_path):
    run = history.read(
        written(tmp_path / "run", record(10), record(20, 1.0), record(30, 1.0), record(20, 2.0))
    )
    assert (run.records["step"], run.records["loss"]) == ([10, 20], [0.5, 2.0])
    assert run.faults["resumed"] == [{"step": None, "time": None, "reached": 30}]


def test_beginning_twice_before_the_first_record_is_going_on(tmp_path):
    start = {"step": 0, "started": "2026-01-02T03:04:05+00:00", "device": "cpu"}
    run = history.read(written(tmp_path / "run", start, start, record(10)))
    assert [each["reached"] for each in run.faults["resumed"]] == [0]


def test_each_error_is_listed_once(tmp_path):
    bad = {"step": 3, "skipped_sample": "t:sa_1", "reason": "the JPEG of t:sa_1 ends early"}
    leak = {"step": 9, "leak": "this process", "bytes": 5, "bytes_per_step": 1, "since": 2}
    run = history.read(
        written(
            tmp_path / "run",
            bad,
            bad | {"step": 7},
            {"step": 8, "save_failed": "no space"},
            leak,
            record(10),
        )
    )
    assert [each["step"] for each in run.faults["skipped_sample"]] == [3]
    assert run.faults["save_failed"] == [{"step": 8, "save_failed": "no space"}]
    assert run.faults["leak"] == [leak]


def test_lines_that_were_cut_short_are_passed_over(tmp_path):
    """One in the midst, of a process that was killed, is counted; the last one is being written."""
    folder = written(tmp_path / "run", record(10))
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "lo\n[1]\n\n' + json.dumps(record(30)) + '\n{"step": 40, "images_')
    run = history.read(folder)
    assert run.records["step"] == [10, 30]
    assert run.invalid_lines == 2


def test_checkpoints_are_listed_with_their_errors(tmp_path):
    folder = written(tmp_path / "run", record(10))
    good, bad, short = (
        checkpoint(folder, 10, score=0.5, scored_by="box on some"),
        checkpoint(folder, 20),
        checkpoint(folder, 30),
    )
    (folder / "checkpoints" / "best").symlink_to(good.name)
    (bad / "model").write_bytes(b"WEIGHTS")
    (short / "model").write_bytes(b"weight")
    quick, whole = history.read(folder), history.read(folder, verify=True)
    assert [(each.name, each.step, each.best, each.score) for each in whole.checkpoints] == [
        (good.name, 10, True, 0.5),
        (bad.name, 20, False, None),
        (short.name, 30, False, None),
    ]
    assert [each.fault is None for each in quick.checkpoints] == [True, True, False]
    assert [each.fault is None for each in whole.checkpoints] == [True, False, False]
    assert "crc32" in whole.checkpoints[1].fault
    assert quick.checkpoints[0].bytes == sum(path.stat().st_size for path in good.iterdir())
    assert (quick.verified, whole.verified) == (False, True)


def test_a_checkpoint_that_goes_away_meanwhile_is_left_out(tmp_path, monkeypatch):
    folder = written(tmp_path / "run", record(10))
    gone, kept = checkpoint(folder, 10), checkpoint(folder, 20)
    verify = history.manifest.verify

    def pruned(path, contents):
        if path == gone:
            shutil.rmtree(gone)
        return verify(path, contents)

    monkeypatch.setattr(history.manifest, "verify", pruned)
    assert [each.name for each in history.read(folder).checkpoints] == [kept.name]


def test_pictures_come_by_step_and_then_by_name(tmp_path):
    folder = written(tmp_path / "run", record(10))
    (folder / "pictures").mkdir()
    for name in ("worst.png", "step_00000200.jpg", "best.png", "step_00000010.jpg", "notes.txt"):
        (folder / "pictures" / name).write_bytes(b"")
    assert [(each.name, each.step) for each in history.read(folder).pictures] == [
        ("step_00000010", 10),
        ("step_00000200", 200),
        ("best", None),
        ("worst", None),
    ]


def test_what_is_missing_or_no_longer_readable_leaves_its_part_empty(tmp_path):
    folder = written(tmp_path / "run", config="a: [")
    (folder / "evaluation.json").write_text("{")
    run = history.read(folder)
    assert run.empty
    assert (run.config, run.scores, run.steps, run.step) == ({}, None, None, 0)
    (folder / "metrics.jsonl").unlink()
    (folder / "evaluation.json").write_text('{"clicks": {"1": 0.5}}')
    assert history.read(folder).scores == {"clicks": {"1": 0.5}}
    (folder / "config.yaml").unlink()
    with error_line(r"run: .*config.yaml.*metrics.jsonl"):
        history.read(folder)


def test_runs_are_found_below_a_folder_in_the_order_they_were_begun(tmp_path):
    for age, name in (
        (30, "out/mae"),
        (20, "out/decoder"),
        (10, "out/joint"),
        (5, "out/mae/checkpoints/odd"),
    ):
        path = written(tmp_path / name, record(10)) / "config.yaml"
        for each in (path, path.with_name("metrics.jsonl")):
            os.utime(each, (1_700_000_000 - age, 1_700_000_000 - age))
    assert [path.name for path in history.find(tmp_path)] == ["mae", "decoder", "joint"]
    assert history.find(tmp_path / "out" / "joint") == [tmp_path / "out" / "joint"]
    with error_line(r"nowhere: is not a folder"):
        history.find(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with error_line(r"bare: .*config.yaml.*metrics.jsonl"):
        history.find(tmp_path / "bare")


def test_labels_are_as_short_as_distinguishes_runs():
    assert history.labels([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert history.labels([Path("x/a"), Path("y/a"), Path("y/b")]) == ["x/a", "y/a", "y/b"]
    with error_line(r"runs/a: .* twice"):
        history.labels([Path("runs/a"), Path.cwd() / "runs" / "a"])


@pytest.mark.slow
def test_torch_is_not_needed(tmp_path):
    """A run is looked at while it trains; a process of its own shows what is imported."""
    code = (
        "import sys; from gigamask.report import history; "
        "history.read(__import__('pathlib').Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(written(tmp_path / "run", record(1)))], env=environment
    )
    assert done.returncode == 0


def test_the_last_step_is_that_of_a_checkpoint_where_nothing_else_was_recorded(tmp_path):
    def saved(step: int, fault: str | None = None) -> history.Checkpoint:
        return history.Checkpoint(f"step_{step}", step, None, 0, "", None, None, False, fault)

    run = history.History(tmp_path)
    assert run.step == 0
    assert replace(run, checkpoints=[saved(1), saved(2, "damaged")]).step == 1
