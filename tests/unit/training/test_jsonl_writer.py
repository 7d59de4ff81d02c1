"""The record's lines: whole, in order, and patient with a disk that is full."""

import json

import pytest

from gigamask.training import logging
from gigamask.training.logging import JsonlWriter
from tests.limits import files_limited


@pytest.fixture
def said():
    return []


@pytest.fixture
def book(tmp_path, said):
    opened = JsonlWriter(tmp_path / "metrics.jsonl", said.append)
    yield opened
    opened.close()


def read(tmp_path):
    return [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]


def test_each_line_is_there_at_once(book, tmp_path):
    for step in range(3):
        book.write({"step": step})
        assert read(tmp_path) == list(range(step + 1))


def test_numbers_that_are_not_finite_are_null(book, tmp_path):
    book.write({"step": 1, "loss": float("nan"), "parts": [float("-inf"), 1e-4], "NaN": "NaN"})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "loss": null, "parts": [null, 0.0001], "NaN": "NaN"}\n'


def test_lines_that_a_full_disk_does_not_take_are_said_once_and_written_later_in_order(
    book, tmp_path, said
):
    with files_limited(100):  # some line is cut in its midst
        for step in range(20):
            book.write({"step": step})
        assert (tmp_path / "metrics.jsonl").stat().st_size == 100
    assert len(said) == 1
    assert "File too large" in said[0]
    book.write({"step": 20})
    assert read(tmp_path) == list(range(21))
    with files_limited(0):
        book.write({"step": 21})
    assert len(said) == 2


def test_what_is_kept_is_bounded_and_the_oldest_go(book, tmp_path, said, monkeypatch):
    monkeypatch.setattr(logging, "MAX_PENDING_BYTES", 60)
    with files_limited(20):  # the second line is cut in its midst
        for step in range(100):
            book.write({"step": step})
    book.write({"step": 100})
    first, cut, *kept = read(tmp_path)
    assert (first, cut) == (0, 1)
    assert kept == list(range(kept[0], 101))
    assert kept[0] > 90


def test_half_a_line_of_a_killed_process_is_ended(tmp_path, said):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    book = JsonlWriter(tmp_path / "metrics.jsonl", said.append)
    book.end_line()
    book.write({"step": 2})
    book.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 1}',
        '{"st',
        '{"step": 2}',
    ]
