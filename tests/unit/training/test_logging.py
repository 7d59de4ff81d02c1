"""What a training writes down."""

import errno
import json
import sys
from dataclasses import replace
from io import BytesIO, StringIO

import numpy as np
import pytest
import torch
from PIL import Image

from gigamask.data import process_memory
from gigamask.interfaces import EvaluationResult
from gigamask.training import logging
from gigamask.training.logging import MetricsLogger, jpeg
from tests.little import little


def printed(capsys) -> list[str]:
    """Return the lines on stderr; rich before 14.3.4 prints an empty one after a progress bar."""
    return [line for line in capsys.readouterr().err.splitlines() if line]


def logger(folder, first=0, **settings) -> MetricsLogger:
    run = replace(little(), out=str(folder))
    return MetricsLogger(run, first, torch.device("cpu"), **settings)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def four_steps(tmp_path, log_every):
    run = replace(little(), out=str(tmp_path), log_every=log_every)
    with MetricsLogger(run, 0, torch.device("cpu")) as watch:
        for step in range(1, 5):
            watch.log_step(step, 3, {"loss": 0.5})
    return lines_of(tmp_path)


def records(tmp_path, seen, monkeypatch):
    monkeypatch.setattr(process_memory, "workers_allocated_bytes", lambda: seen)
    return four_steps(tmp_path, 2)


def test_small_values_keep_their_digits():
    values = {"lr": 4.1234567e-7, "loss": 1.2345678, "none": 0.0, "bad": float("inf")}
    expected = {"lr": 4.12346e-7, "loss": 1.234568, "none": 0.0, "bad": float("inf")}
    assert logging._rounded(values) == expected


def test_the_largest_loader_process_is_written_down(tmp_path, monkeypatch):
    found = records(tmp_path, {7: 150_000_000, 9: 170_000_000}, monkeypatch)
    assert [record["step"] for record in found] == [2, 4]
    assert {record["loader_mb"] for record in found} == {170.0}


def test_without_loader_processes_there_is_nothing_to_write(tmp_path, monkeypatch):
    assert all("loader_mb" not in record for record in records(tmp_path, {}, monkeypatch))


@pytest.mark.parametrize("best_by", ["1 click", "box"])
def test_what_an_evaluation_found_is_written_down_and_said(tmp_path, capsys, best_by):
    """The score is the one that the best checkpoint is kept by; a worry is a line in both."""
    verdict = EvaluationResult(
        {"1 click": 0.41234567, "box": 0.75},
        best_by,
        ("it does not look",),
        of="9 masks on 2 images",
        subject="box of these",
        errors={"box": 0.0123},
    )
    with logger(tmp_path) as watch:
        assert watch.log_evaluation(3, verdict) == verdict.scores[best_by]
    (line,) = lines_of(tmp_path)
    assert line.pop("seconds") >= 0
    assert (
        line.items()
        >= {
            "step": 3,
            "evaluation": {"1 click": 0.412346, "box": 0.75},
            "of": "9 masks on 2 images",
            "subject": "box of these",
            "standard_error": {"box": 0.0123},
            "warnings": ["it does not look"],
        }.items()
    )
    found, worry = printed(capsys)
    assert found.startswith("evaluated at step 3, 9 masks on 2 images: ")
    assert found.endswith(": 1 click 0.412  box 0.750 ± 0.012")
    assert worry == "  it does not look"


def test_scores_may_be_numbers_of_numpy_and_torch(tmp_path, no_shape_checks):
    scores = {"f1": np.float32(12.5), "mae": torch.tensor(7.0)}
    with logger(tmp_path) as watch:
        assert type(watch.log_evaluation(1, EvaluationResult(scores, "f1"))) is float
    assert lines_of(tmp_path)[0]["evaluation"] == {"f1": 12.5, "mae": 7.0}


def test_meters_run_before_each_step_and_at_the_end_and_are_logged(tmp_path, capsys):
    """Also where a step fails; their time is not that of a step."""
    looked = []

    def meter(done, over):
        looked.append((done, over))
        if done == 6:
            yield "six are done", {"half": True}
        if over:
            yield "over", {}

    def trains() -> None:
        with logger(tmp_path, 5, observers=[meter]) as watch:
            for number in watch.time_data(range(10)):
                watch.log_step(6 + number, 3, {"loss": 1 / (1 - number)})

    with pytest.raises(ZeroDivisionError):
        trains()
    assert looked == [(5, False), (6, False), (6, True)]
    lines = lines_of(tmp_path)
    assert [line for line in lines if "half" in line] == [{"step": 6, "half": True}] * 2
    assert [line for line in printed(capsys) if not line.startswith("step ")] == [
        "six are done",
        "six are done",
        "over",
    ]


def test_what_is_open_is_closed_where_a_meter_fails(tmp_path):
    def meter(done, over):
        raise OSError(28, "No space left on device")

    watch = logger(tmp_path, observers=[meter])
    with pytest.raises(OSError, match="No space left"), watch:
        pass
    with pytest.raises(ValueError, match="closed file"):
        watch.write({"step": 1})


def test_the_time_of_meters_is_not_that_of_a_step(tmp_path, monkeypatch):
    clock = [0.0]

    def meter(done, over):
        clock[0] += 100.0
        return ()

    monkeypatch.setattr("gigamask.training.logging.time.perf_counter", lambda: clock[0])
    with logger(tmp_path, observers=[meter]) as watch:
        for number in watch.time_data(range(2)):
            clock[0] += 2.0
            watch.log_step(number + 1, 6, {"loss": 0.5})
            if number:
                break
    lines = lines_of(tmp_path)
    assert [line["images_per_s"] for line in lines] == [3.0, 3.0]


@pytest.mark.parametrize("wait_s, shown", [(0.05, None), (1.0, "waits for data 33%")])
def test_a_training_that_waits_for_data_says_so(tmp_path, monkeypatch, capsys, wait_s, shown):
    clock = [0.0]

    def batches():
        while True:
            clock[0] += wait_s
            yield 0

    monkeypatch.setattr("gigamask.training.logging.time.perf_counter", lambda: clock[0])
    run = replace(little(), out=str(tmp_path), steps=60, log_every=10)
    with MetricsLogger(run, 0, torch.device("cpu")) as watch:
        for step, _ in zip(range(1, 61), watch.time_data(batches()), strict=False):
            clock[0] += 2.0
            watch.log_step(step, 6, {"loss": 0.5})
    lines = printed(capsys)
    assert "waits for data" not in lines[0] or shown
    assert (shown in lines[-1]) if shown else "waits" not in lines[-1]


def test_the_time_of_an_evaluation_is_not_that_of_a_step(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("gigamask.training.logging.time.perf_counter", lambda: clock[0])
    with logger(tmp_path) as watch:
        for step in (1, 2):
            clock[0] += 2.0
            watch.log_step(step, 6, {"loss": 0.5})
            clock[0] += 100.0
            watch.log_evaluation(step, EvaluationResult({"box": 0.5}, "box"))
    lines = lines_of(tmp_path)
    assert [line["images_per_s"] for line in lines if "loss" in line] == [3.0, 3.0]


class Kept:
    """A board that keeps what it is given."""

    def __init__(self) -> None:
        self.numbers, self.pictures, self.closed = [], [], False

    def scalars(self, values, step):
        self.numbers.append((step, dict(values)))

    def picture(self, name, rgb, step):
        self.pictures.append((name, rgb.shape, step))

    def close(self):
        self.closed = True


def test_each_beginning_is_noted_with_the_checkpoints_it_passed_over(tmp_path):
    for first, damaged in ((2, ["step_00000004"]), (4, [])):
        with logger(tmp_path, first) as watch:
            watch.log_start(2, damaged)
    one, two = lines_of(tmp_path)
    assert (
        one.items()
        >= {
            "step": 2,
            "device": "cpu",
            "processes": 2,
            "threads": torch.get_num_threads(),
            "corrupt_checkpoints": ["step_00000004"],
        }.items()
    )
    assert one["started"].startswith("20")
    assert (two["step"], "corrupt_checkpoints" in two) == (4, False)


def test_the_line_that_a_kill_cut_short_is_ended(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    with logger(tmp_path, 2) as watch:
        watch.write({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1}',
        '{"step": 2, "lo',
        '{"step": 3}',
    ]


def test_other_processes_write_no_beginning_and_show_nothing(tmp_path):
    with logger(tmp_path, enabled=False) as watch:
        watch.log_start()
        watch.log_step(1, 3, {"loss": 0.5})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert lines_of(tmp_path) == []


def test_the_picture_of_an_evaluation_is_kept_and_shown(tmp_path, monkeypatch, capsys):
    board = Kept()
    monkeypatch.setattr(logging, "make_trackers", lambda *given: [board])
    rgb = np.zeros((30, 50, 3), np.uint8)
    rgb[:, 25:, 0] = 255
    with logger(tmp_path) as watch:
        watch.log_step(10, 3, {"loss": 0.5})
        watch.log_evaluation(10, EvaluationResult({"box": 0.5}, "box", picture=rgb))
        watch.log_evaluation(20, EvaluationResult({"box": 0.5}, "box"))
        (tmp_path / "pictures").rename(tmp_path / "elsewhere")
        (tmp_path / "pictures").write_text("in the way")
        watch.log_evaluation(30, EvaluationResult({"box": 0.5}, "box", picture=rgb))
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["step_00000010.jpg"]
    with Image.open(tmp_path / "elsewhere" / "step_00000010.jpg") as kept:
        assert kept.size == (50, 30)
        assert kept.getpixel((45, 15))[0] > 240
        assert max(kept.getpixel((5, 15))) < 15
    assert "step 30 was not saved" in capsys.readouterr().err
    assert board.pictures == [("predictions", (30, 50, 3), 10), ("predictions", (30, 50, 3), 30)]
    assert [step for step, _ in board.numbers] == [10, 10, 20, 30]
    assert board.numbers[0][1].keys() >= {"loss", "images_per_s"}
    assert board.numbers[1][1] == {"evaluation/box": 0.5}
    assert board.closed


class ClosedTerminal(StringIO):
    """A terminal whose window is closed after the first step."""

    open, lines = True, 0

    def write(self, text: str) -> int:
        if not self.open:
            raise OSError(errno.EIO, "Input/output error")
        self.lines += 1
        return len(text)

    def flush(self) -> None:
        self.write("")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_closes_does_not_stop_training(tmp_path, monkeypatch, terminal):
    """Neither with a progress bar nor with lines, as behind `| tee`."""
    stream = ClosedTerminal()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with logger(tmp_path) as watch:
        for step in (1, 2, 3):
            watch.log_step(step, 3, {"loss": 0.5})
            watch.log("a line", {})
            stream.open = False
    assert stream.lines
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_a_picture_is_small():
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), np.uint8)
    packed = jpeg(noise)
    assert len(packed) <= logging.MAX_PICTURE_BYTES
    assert Image.open(BytesIO(packed)).size == (500, 500)


class Breaking:
    """A board that fails at the second update."""

    def __init__(self, error):
        self.error, self.shown = error, []

    def scalars(self, values, step):
        if step == 2:
            raise self.error
        self.shown.append(step)

    def picture(self, name, rgb, step):
        self.shown.append(name)

    def close(self):
        self.shown.append("closed")


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            TypeError("Descriptors cannot be created directly.\nSee"),
            "Descriptors cannot be created",
        ),
    ],
)
def test_tracker_that_fails_does_not_stop_training(error, reason, tmp_path, monkeypatch, capsys):
    board = Breaking(error)
    monkeypatch.setattr("gigamask.training.logging.make_trackers", lambda *given: [board])
    assert len(four_steps(tmp_path, 1)) == 4
    assert board.shown == [1]
    assert capsys.readouterr().err.count(f"Breaking stopped: {reason}") == 1
