"""What a training writes down."""

import json
from dataclasses import replace

import torch

from gigamask.data import footprint
from gigamask.data.footprint import Footprint
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
