"""What a training writes down."""

import json
from dataclasses import replace

import pytest
import torch

from gigamask.data import footprint
from gigamask.data.footprint import Footprint
from gigamask.seams import Verdict
from gigamask.train.watch import Watch
from tests.little import little


def records(tmp_path, seen, monkeypatch):
    monkeypatch.setattr(footprint, "of_children", lambda: seen)
    with Watch(replace(little(), out=str(tmp_path), log_every=2), 0, torch.device("cpu")) as watch:
        for step in range(1, 5):
            watch.record(step, 3, {"loss": 0.5})
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_the_largest_loader_process_is_written_down(tmp_path, monkeypatch):
    found = records(tmp_path, {7: Footprint(300, 200, 150_000_000), 9: Footprint(300, 200, 170_000_000)}, monkeypatch)
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
