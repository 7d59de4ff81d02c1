import json
from dataclasses import replace

import pytest
import torch

from gigamask.data.loader import collate
from gigamask.records import DataCursor, SkippedSample
from gigamask.training.health_checks import MAX_SKIPPED_IN_A_ROW, HealthChecks
from gigamask.training.logging import MetricsLogger
from gigamask.types import RandomSpec
from tests.errors import error_line
from tests.little import little


@pytest.fixture
def guard(tmp_path):
    run = replace(little(), out=str(tmp_path), max_bad_fraction=0.02)
    with MetricsLogger(run, 0, torch.device("cpu")) as watch:
        yield HealthChecks(run, watch, samples_per_epoch=20)


def batch_with(*skipped: str):
    return collate(
        [],
        tuple(SkippedSample(name, f"{name}: is broken") for name in skipped),
        little().sample_config,
        RandomSpec(0, 2, 2),
        0.0,
        DataCursor(3),
    )


def test_a_bad_sample_is_said_once_and_counted(guard, tmp_path):
    guard.check(1, [batch_with("a.tar:1")], skipped=False)
    guard.check(2, [batch_with("a.tar:1"), batch_with("a.tar:2")], skipped=False)
    assert guard.skipped_samples == {"a.tar:1", "a.tar:2"}
    notes = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert notes == [
        {"step": 1, "skipped_sample": "a.tar:1", "reason": "a.tar:1: is broken"},
        {"step": 2, "skipped_sample": "a.tar:2", "reason": "a.tar:2: is broken"},
    ]


def test_ten_different_bad_samples_stop_the_run(guard):
    for step in range(3):  # two of twenty, visited again in each epoch
        guard.check(step, [batch_with(*"12")], skipped=False)
    guard.check(4, [batch_with(*"123456789")], skipped=False)
    with error_line(r" 10 of 16 .*2.0%.*--max-bad-fraction"):
        guard.check(5, [batch_with("10")], skipped=False)


def test_different_samples_are_counted_once(guard):
    """Half of them are bad, however often the others recur."""
    guard.seen = 10_000
    with error_line(r" 10 of 20 .*2.0%"):
        guard.check(500, [batch_with(*map(str, range(10)))], skipped=False)


def test_no_bad_sample_is_allowed_if_the_fraction_is_0(guard):
    guard.config = replace(guard.config, max_bad_fraction=0.0)
    with error_line(r" 1 of 1 .*0.0%"):
        guard.check(1, [batch_with("1")], skipped=False)


def test_skipped_steps_in_a_row_stop_the_run(guard):
    guard.config = replace(guard.config, steps=99)
    for step in range(MAX_SKIPPED_IN_A_ROW - 1):
        guard.check(step, [batch_with()], skipped=True)
    guard.check(50, [batch_with()], skipped=False)
    for step in range(MAX_SKIPPED_IN_A_ROW - 1):
        guard.check(step, [batch_with()], skipped=True)
    with error_line(r"10.*--optimizer.lr"):
        guard.check(99, [batch_with()], skipped=True)


def test_a_short_run_whose_steps_are_all_skipped_fails(guard):
    guard.config = replace(guard.config, steps=2)
    guard.check(1, [batch_with()], skipped=True)
    with error_line(r" 2 steps in a row were skipped"):
        guard.check(2, [batch_with()], skipped=True)
