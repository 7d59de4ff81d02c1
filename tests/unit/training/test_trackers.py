"""Boards: TensorBoardTracker's event files, and Weights & Biases without a network."""

import importlib.util
import shutil
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gigamask.training import trackers
from gigamask.training.config import check_resume
from tests.errors import error_line
from tests.little import little

OFFLINE = """
import sys
from dataclasses import replace
import numpy as np
from gigamask.training import trackers
from tests.little import little

run = replace(little(), out=sys.argv[1], wandb="sam")
board = trackers.WandbTracker(run)
board.scalars({"loss": 0.25}, 3)
board.scalars({"loss": 0.5}, 2)
board.picture("predictions", np.zeros((4, 6, 3), np.uint8), 3)
board.close()
"""


def test_tensorboard_has_the_numbers_and_the_pictures(tmp_path):
    (board,) = trackers.make_trackers(replace(little(), out=str(tmp_path)))
    board.scalars({"loss": 0.25, "evaluation/box": 0.5}, 3)
    board.picture("predictions", np.zeros((4, 6, 3), np.uint8), 3)
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(each.step, each.value) for each in events.Scalars("evaluation/box")] == [(3, 0.5)]
    assert [(each.step, each.width, each.height) for each in events.Images("predictions")] == [
        (3, 6, 4)
    ]


def test_steps_that_are_trained_again_replace_those_before(tmp_path):
    """A run that was killed in step 7 and goes on from the checkpoint of step 4."""
    config = replace(little(), out=str(tmp_path))
    for first, last in ((0, 7), (4, 9)):
        (board,) = trackers.make_trackers(config, first)
        for step in range(first + 1, last + 1):
            board.scalars({"loss": float(first)}, step)
        if last == 9:
            board.close()  # the killed one was not closed, and yet nothing is missing
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    read = [(each.step, each.value) for each in events.Scalars("loss")]
    assert read == [(step, 0.0 if step < 5 else 4.0) for step in range(1, 10)]


class FakeWandb(types.SimpleNamespace):
    """Keeps what is sent, and what the server would say of it to a resumed run."""

    def __init__(self) -> None:
        super().__init__(Error=OSError, Settings=dict, Image=len, summary={}, rows=[])

    def init(self, **given: object) -> "FakeWandb":
        return self

    def define_metric(self, *given: object, **named: object) -> None:
        pass

    def log(self, row: dict) -> None:
        self.summary |= row
        self.rows.append(row)


def test_weights_and_biases_gets_each_step_once(tmp_path, monkeypatch):
    """Also the evaluation that the killed run had not finished."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = replace(little(), out=str(tmp_path), wandb="sam")
    for first, last, evaluated in ((0, 7, []), (4, 9, [4, 8]), (8, 10, [8])):
        board = trackers.WandbTracker(config)
        for step in range(first + 1, last + 1):
            board.scalars({"loss": 0.5}, step)
        for step in evaluated:
            board.scalars({"evaluation/box": 0.5}, step)
            board.picture("predictions", np.zeros((4, 6, 3), np.uint8), step)
    assert [row["step"] for row in fake.rows if "loss" in row] == list(range(1, 11))
    for name in ("evaluation/box", "predictions"):
        assert [row["step"] for row in fake.rows if name in row] == [4, 8]


def test_a_copy_of_a_run_folder_is_another_run(tmp_path):
    """One that was moved is the same, also once another run has its place."""
    first, copy, moved = (tmp_path / name for name in ("first", "copy", "möved"))
    first.mkdir()
    name = trackers.run_id(first / "wandb_id")
    shutil.copytree(first, copy)
    other = trackers.run_id(copy / "wandb_id")
    assert other != name
    assert trackers.run_id(copy / "wandb_id") == other
    assert trackers.run_id(first / "wandb_id") == name
    first.rename(moved)
    assert trackers.run_id(moved / "wandb_id") == name
    first.mkdir()
    assert trackers.run_id(first / "wandb_id") != name
    assert trackers.run_id(moved / "wandb_id") == name
    (copy / "wandb_id").write_text("0123abcd")  # of an earlier version
    assert trackers.run_id(copy / "wandb_id") == "0123abcd"


def test_without_packages_there_are_no_trackers_and_requesting_one_is_an_error(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = replace(little(), out=str(tmp_path), data=("x",))
    assert trackers.make_trackers(run) == []
    with error_line(r"^--wandb sam.*'gigamask\[wandb\]"):
        replace(run, wandb="sam").check()


def test_run_can_resume_with_another_tracker():
    run = replace(little(), data=("x",))
    assert check_resume(run, replace(run, wandb="sam"), False) == {"wandb": (None, "sam")}


@pytest.mark.long
def test_weights_and_biases_goes_on_with_the_same_run(tmp_path):
    """In processes of their own: it starts others, and warns of what is none of ours."""
    pytest.importorskip("wandb")
    environment = {"WANDB_MODE": "offline", "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE, str(tmp_path)],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
    name = (tmp_path / "wandb_id").read_text().split()[0]
    kept = list((tmp_path / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert kept
    assert all(
        b"predictions" in path.read_bytes()
        and list(path.parent.glob("files/media/images/predictions_*.png"))
        for path in kept
    )


def test_wandb_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    class RefusedError(Exception):
        pass

    def init(**given):
        assert given["config"]["steps"] == 4
        raise RefusedError("No API key configured.\nUse `wandb login`")

    fake = types.SimpleNamespace(Error=RefusedError, init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with error_line(r"^--wandb sam.*API.*WANDB_MODE=offline"):
        trackers.WandbTracker(replace(little(), out=str(tmp_path), wandb="sam"))
