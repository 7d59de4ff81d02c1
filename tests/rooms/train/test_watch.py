"""What a training writes down."""

import json
from dataclasses import replace

import pytest
import torch

from gigamask.data import footprint
from gigamask.seams import Verdict
from gigamask.train.watch import Watch
from tests.little import little


def records(tmp_path, seen, monkeypatch):
    monkeypatch.setattr(footprint, "written_by_children", lambda: seen)
    with Watch(replace(little(), out=str(tmp_path), log_every=2), 0, torch.device("cpu")) as watch:
        for step in range(1, 5):
            watch.record(step, 3, {"loss": 0.5})
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_largest_loader_process_is_written_down(tmp_path, monkeypatch):
    found = records(tmp_path, {7: 150_000_000, 9: 170_000_000}, monkeypatch)
    assert [record["step"] for record in found] == [2, 4]
    assert {record["loader_mb"] for record in found} == {170.0}


def test_without_loader_processes_there_is_nothing_to_write(tmp_path, monkeypatch):
    assert all("loader_mb" not in record for record in records(tmp_path, {}, monkeypatch))


@pytest.mark.parametrize("best_by", ["1 click", "box"])
def test_what_an_evaluation_found_is_written_down_and_said(tmp_path, capsys, best_by):
    """The score is the one that the best checkpoint is kept by; a worry is a line in both."""
    verdict = Verdict({"1 click": 0.41234567, "box": 0.75}, best_by, ("blind: it does not look",))
    with Watch(replace(little(), out=str(tmp_path)), 0, torch.device("cpu")) as watch:
        assert watch.judge(3, verdict) == verdict.scores[best_by]
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line.pop("seconds") >= 0
    assert line.items() >= {"step": 3, "evaluation": {"1 click": 0.412346, "box": 0.75}, "worries": ["blind: it does not look"]}.items()
    found, worry = capsys.readouterr().err.splitlines()
    assert found.startswith("evaluated at step 3")
    assert found.endswith(": 1 click 41.2  box 75.0")
    assert worry == "  blind: it does not look"


def test_meters_look_before_each_step_and_once_at_the_end_and_what_they_find_is_told(tmp_path, capsys):
    """Also where a step fails; their time is not that of a step."""
    looked = []

    def meter(done, over):
        looked.append((done, over))
        if done == 6:
            yield "six are done", {"half": True}
        if over:
            yield "over", {}

    def trains() -> None:
        with Watch(replace(little(), out=str(tmp_path)), 5, torch.device("cpu"), meters=[meter]) as watch:
            for number in watch.waiting(range(10)):
                watch.record(6 + number, 3, {"loss": 1 / (1 - number)})

    with pytest.raises(ZeroDivisionError):
        trains()
    assert looked == [(5, False), (6, False), (6, True)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "half" in line] == [{"step": 6, "half": True}] * 2
    assert [line for line in capsys.readouterr().err.splitlines() if not line.startswith("step ")] == ["six are done", "six are done", "over"]


def test_what_is_open_is_closed_where_a_meter_fails(tmp_path):
    def meter(done, over):
        raise OSError(28, "No space left on device")

    watch = Watch(replace(little(), out=str(tmp_path)), 0, torch.device("cpu"), meters=[meter])
    with pytest.raises(OSError, match="No space left"), watch:
        pass
    with pytest.raises(ValueError, match="closed file"):
        watch.note({"step": 1})


def test_the_time_of_meters_is_not_that_of_a_step(tmp_path, monkeypatch):
    clock = [0.0]

    def meter(done, over):
        clock[0] += 100.0
        return ()

    monkeypatch.setattr("gigamask.train.watch.time.perf_counter", lambda: clock[0])
    with Watch(replace(little(), out=str(tmp_path)), 0, torch.device("cpu"), meters=[meter]) as watch:
        for number in watch.waiting(range(2)):
            clock[0] += 2.0
            watch.record(number + 1, 6, {"loss": 0.5})
            if number:
                break
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["images_per_s"] for line in lines] == [3.0, 3.0]


def test_the_time_of_an_evaluation_is_not_that_of_a_step(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("gigamask.train.watch.time.perf_counter", lambda: clock[0])
    with Watch(replace(little(), out=str(tmp_path)), 0, torch.device("cpu")) as watch:
        for step in (1, 2):
            clock[0] += 2.0
            watch.record(step, 6, {"loss": 0.5})
            clock[0] += 100.0
            watch.judge(step, Verdict({"box": 0.5}, "box"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["images_per_s"] for line in lines if "loss" in line] == [3.0, 3.0]
