"""What a command says about itself while it works."""

import re
import time
from contextvars import copy_context

import pytest

from gigamask import progress
from gigamask.cli import main
from tests.errors import error_line


def shown(mode, work):
    def run():
        progress.CHOSEN.set(mode)
        work()

    copy_context().run(run)


def slow():
    progress.say("begins")
    for _ in progress.track(range(3), "read"):
        time.sleep(0.03)


def test_lines_say_how_much_is_done_and_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.04)
    shown("lines", slow)
    said = capsys.readouterr()
    assert said.out == "begins\n"
    others = said.err.splitlines()
    assert others
    assert all(re.fullmatch(r"read: \d of 3, 0 s(, 0 s left)?", line) for line in others)


def test_what_an_earlier_run_has_done_does_not_count_for_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.5)

    def resumed():
        with progress.progress_bar("read") as update:
            update(500, 1000)
            time.sleep(0.3)
            update(500.9, 1000)
            time.sleep(0.3)

    shown("lines", resumed)
    count, _, left = capsys.readouterr().err.splitlines()[0].split(", ")
    assert count == "read: 500 of 1000"
    assert float(left.split()[0]) > 100


def test_nothing_is_shown_if_nothing_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)
    shown("none", slow)
    assert capsys.readouterr() == ("", "")


def test_a_bar_may_be_shown_within_that_of_a_training(capsys):
    """Older versions of rich show one display at a time."""

    def work():
        with progress.make_bars() as bars:
            before = progress.BARS.set(bars)
            slow()
            progress.BARS.reset(before)
            assert not bars.tasks

    shown("bar", work)
    assert "begins" in capsys.readouterr().out


def test_a_bar_leaves_standard_output_to_programs(capsys):
    def work():
        with progress.progress_bar("work"):
            print("{}")

    shown("bar", work)
    captured = capsys.readouterr()
    assert captured.out == "{}\n"
    assert "work" in captured.err


@pytest.mark.parametrize(
    "words", [["--progress", "lines"], ["--progress=none", "--progress=lines"]]
)
def test_the_flag_is_taken_from_the_arguments_of_any_command(words):
    def work():
        assert main.choose_progress(["stats", *words, "scenes"]) == ["stats", "scenes"]
        assert progress.mode() == "lines"

    copy_context().run(work)


def test_another_value_is_refused():
    with error_line(r"bar, lines, none \(got 'fancy'\)"):
        main.choose_progress(["stats", "--progress", "fancy"])


def test_of_several_processes_one_shows_progress(monkeypatch):
    monkeypatch.setenv("RANK", "1")

    def work():
        main.choose_progress(["train", "--progress", "lines"])
        assert progress.mode() == "none"

    copy_context().run(work)
