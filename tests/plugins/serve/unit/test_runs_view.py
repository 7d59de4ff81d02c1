"""Watching runs: names come from our own list, curves are short, and changed files are
read again.
"""

import json
import os
import time
from dataclasses import replace

import pytest

from gigamask import config_files
from gigamask.errors import GigamaskError
from gigamask.plugins.serve.open_images import NotFoundError
from gigamask.plugins.serve.runs_view import LIVE_S, RunsView
from gigamask.report import history
from gigamask.training.trainer import train
from tests.broken import flip
from tests.errors import error_line
from tests.little import little
from tests.unit.report.test_damaged import DAMAGED
from tests.unit.report.test_history import checkpoint, record, written


def write_records(folder, steps, **more):
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(
            json.dumps({"step": step, "loss": 1 / step, "images_per_s": 2.0, **more}) + "\n"
            for step in steps
        )


@pytest.fixture
def runs(tmp_path):
    for name, steps in (("a", 4), ("deep/b", 6)):
        run = replace(little(), out=str(tmp_path / name), steps=steps)
        config_files.save_config(run)
        write_records(tmp_path / name, range(1, 5))
    return tmp_path


def by_name(view):
    return {each["name"]: each for each in view.runs()}


def test_runs_are_listed_by_names_below_the_folder_and_new_ones_come(runs):
    view = RunsView(runs)
    told = by_name(view)
    assert told.keys() == {"a", "deep/b"}
    assert (told["a"]["step"], told["a"]["steps"], told["a"]["live"]) == (4, 4, False)
    assert told["deep/b"]["live"]
    assert told["deep/b"]["images_per_s"] == 2.0
    assert told["deep/b"]["batch_size"] == str(little().batch_size)
    config_files.save_config(replace(little(), out=str(runs / "later")))
    assert "later" in by_name(view)
    assert [each["name"] for each in RunsView(runs / "a").runs()] == ["a"]
    long_ago = time.time() - 2 * LIVE_S
    os.utime(runs / "deep" / "b" / "metrics.jsonl", (long_ago, long_ago))
    assert not any(each["live"] for each in view.runs())


def test_what_is_written_meanwhile_is_read(runs):
    view = RunsView(runs)
    assert view.run("a")["records"]["step"] == [1, 2, 3, 4]
    write_records(runs / "a", [5])
    assert view.run("a")["records"]["step"] == [1, 2, 3, 4, 5]
    json.dumps(view.run("a"), allow_nan=False)


def test_folder_without_runs_is_empty_and_missing_folder_an_error(tmp_path):
    assert RunsView(tmp_path).runs() == []
    with error_line("is not a folder"):
        RunsView(tmp_path / "none")


@pytest.mark.parametrize("name", ["../a", "/etc", "", "a/checkpoints", "."])
def test_names_of_others_are_unknown(runs, name):
    with pytest.raises(NotFoundError, match="no such run"):
        RunsView(runs / "deep").run(name)


def test_pictures_are_found_by_their_names_alone(runs):
    (runs / "a" / "pictures").mkdir()
    (runs / "a" / "pictures" / "step_00000002.jpg").write_bytes(b"jpeg")
    (runs / "a" / "secret.jpg").write_bytes(b"other")
    view = RunsView(runs)
    [listed] = view.run("a")["pictures"]
    assert (listed["name"], listed["step"]) == ("step_00000002", 2)
    assert view.picture("a", "step_00000002") == (b"jpeg", "image/jpeg", listed["shows"])
    for other in ("../secret", "secret", "step_00000002.jpg", str(runs / "a" / "secret.jpg")):
        with pytest.raises(NotFoundError, match="no such picture"):
            view.picture("a", other)


@pytest.mark.slow
def test_checkpoints_are_verified_to_the_last_byte(tmp_path, scenes):
    run = replace(little(), data=(str(scenes),), out=str(tmp_path / "a"), steps=2)
    train(run, on_start=lambda: config_files.save_config(run))
    view = RunsView(tmp_path)
    assert [each["fault"] for each in view.run("a")["checkpoints"]] == [None]
    assert view.verify("a", 2)["fault"] is None
    flip(tmp_path / "a" / "checkpoints" / "step_00000002" / "model.safetensors", -1)
    assert "crc32" in view.verify("a", 2)["fault"]
    with pytest.raises(NotFoundError, match="no checkpoint of step 9"):
        view.verify("a", 9)


def test_differing_flags_are_listed(runs):
    assert RunsView(runs).differences("a", "deep/b") == [
        {"flag": "steps", "one": "4", "other": "6"}
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_run_is_listed_beside_others(kind, tmp_path):
    damage, _ = DAMAGED[kind]
    written(tmp_path / "sound", record(1), record(2))
    checkpoint(written(tmp_path / "bad", record(1)), 1)
    damage(tmp_path / "bad")
    view = RunsView(tmp_path)
    listed = by_name(view)
    assert listed.keys() == {"bad", "sound"}
    assert listed["sound"]["step"] == 2
    json.dumps([*listed.values(), view.run("bad")], allow_nan=False).encode()


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path, monkeypatch):
    for name in ("bad", "sound"):
        written(tmp_path / name, record(1))
    read = history.read

    def failing(folder):
        if folder.name == "bad":
            raise GigamaskError("no permission")
        return read(folder)

    monkeypatch.setattr(history, "read", failing)
    listed = {each["name"]: each["fault"] for each in RunsView(tmp_path).runs()}
    assert listed == {"bad": "no permission", "sound": None}


def test_a_run_of_an_odd_name_that_names_code_is_listed_and_runs_none(tmp_path):
    run = written(tmp_path / os.fsdecode(b"\xff<b>"), record(1), config="recipe: evil.py:little\n")
    (run / "evil.py").write_text("raise SystemExit('it was run')")
    assert [each["fault"] for each in RunsView(tmp_path).runs()] == [None]
