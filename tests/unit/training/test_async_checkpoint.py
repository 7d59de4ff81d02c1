"""Saves that happen behind the training's back, and what becomes of those that fail."""

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask.models import manifest
from gigamask.training import async_checkpoint, checkpoint
from gigamask.training.async_checkpoint import AsyncCheckpointer
from gigamask.training.trainer import train
from tests.checkpoints import resume
from tests.laws.test_training import run_in, same
from tests.little import little
from tests.unit.training.test_checkpoint import state_at


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return replace(little(), out=str(tmp_path / "run"), data=("x",))


def kept(run) -> list[str]:
    return [path.name for path in manifest.list_checkpoints(Path(run.out) / "checkpoints")]


@pytest.mark.slow
def test_written_state_is_that_of_the_call(run, monkeypatch):
    """The training goes on, and changes its state, while the thread is held up."""
    write, go_on = checkpoint.write, threading.Event()
    monkeypatch.setattr(checkpoint, "write", lambda *given: (go_on.wait(10), write(*given))[1])
    run = replace(run, ema=0.5)
    state = state_at(run, 1)
    state.update_average(run.ema)
    asked = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    average = {name: tensor.clone() for name, tensor in state.average.items()}
    with AsyncCheckpointer(run, pytest.fail) as kept_by:
        kept_by.save(state)
        for tensor in (*state.model.state_dict().values(), *state.average.values()):
            tensor.zero_()
        assert kept(run) == []
        go_on.set()
    resumed = resume(run, torch.device("cpu"))
    loaded = resumed.model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in asked.items())
    assert all(torch.equal(resumed.average[name], tensor) for name, tensor in average.items())
    assert any(not torch.equal(asked[name], tensor) for name, tensor in average.items())


@pytest.mark.slow
def test_one_at_a_time_and_all_of_them_are_written(run):
    with AsyncCheckpointer(run, pytest.fail) as kept_by:
        for step in (1, 2, 3):
            kept_by.save(state_at(run, step))
        kept_by.record_score(0.5, "box")
        kept_by.finish(state_at(run, 3))
        assert manifest.verify(Path(run.out) / "checkpoints" / "best")["score"] == 0.5, (
            "what is saved is not saved again"
        )
        kept_by.finish(state_at(run, 4))
    assert kept(run) == ["step_00000003", "step_00000004"]


def full(*given):
    raise OSError(28, "No space left on device", "weights")


@pytest.mark.slow
def test_failed_save_is_reported_and_repeated(run, monkeypatch):
    monkeypatch.setattr(async_checkpoint, "RETRY_S", 0.05)
    told = []
    with AsyncCheckpointer(run, lambda *said: told.append(said)) as kept_by:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write", full)
            kept_by.save(state_at(run, 1))
            kept_by.record_score(0.5, "box")
            assert not kept_by.overdue
        time.sleep(0.06)
        assert kept_by.overdue
        kept_by.save(state_at(run, 2))
        kept_by.wait()
        assert not kept_by.overdue
    reason = "[Errno 28] No space left on device: 'weights'"
    assert told == [
        (
            f"step 1 not saved, training continues and retries in 0 s: {reason}",
            {"step": 1, "save_failed": reason},
        )
    ]
    assert kept(run) == ["step_00000002"]


def test_failed_score_is_reported(run, monkeypatch):
    told = []
    with AsyncCheckpointer(run, lambda *said: told.append(said)) as kept_by:
        kept_by.save(state_at(run, 1))
        monkeypatch.setattr(checkpoint, "record_score", full)
        kept_by.record_score(0.5, "box")
    assert [line for line, _ in told] == [
        "step 1 score not recorded: [Errno 28] No space left on device: 'weights'"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_replaced, reason",
    [
        (False, "No such file or directory"),
        (True, "was replaced while it was trained"),
    ],
)
def test_a_run_folder_that_is_moved_gets_no_checkpoint_until_it_is_back(
    run, tmp_path, is_replaced, reason
):
    """Another run may be in its place by then, which must stay as it is."""
    told, out = [], Path(run.out)
    with AsyncCheckpointer(run, lambda *said: told.append(said)) as kept_by:
        kept_by.save(state_at(run, 1))
        kept_by.wait()
        out.rename(tmp_path / "moved")
        if is_replaced:
            shutil.copytree(tmp_path / "moved", out)
        kept_by.record_score(0.5, "box")
        kept_by.save(state_at(run, 2))
        kept_by.wait()
        with pytest.raises(OSError, match=reason):
            kept_by.finish(state_at(run, 2))
        assert kept(run) == ["step_00000001"] * is_replaced
        if is_replaced:
            assert "score" not in manifest.verify(out / "checkpoints" / "step_00000001")
            out.rename(tmp_path / "other")
        (tmp_path / "moved").rename(out)
        kept_by.finish(state_at(run, 2))
    assert kept(run) == ["step_00000001", "step_00000002"]
    reason = f"{reason}: '{out}'"
    assert all(line.endswith(reason) for line, _ in told)
    assert [line.partition(":")[0] for line, _ in told] == [
        *["step 1 score not recorded"] * (1 + is_replaced),
        "step 2 not saved, training continues and retries in 60 s",
        *["step 2 score not recorded"] * is_replaced,
    ]


@pytest.mark.long
def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path, scenes, monkeypatch, capsys):
    """The saves of steps 2 and 3 fail, and that of step 4, the last, on its first attempt."""
    monkeypatch.setattr(async_checkpoint, "RETRY_S", 0.0)
    whole = train(run_in(tmp_path / "whole", scenes, steps=4, save_every=1))
    run, write, failing = (
        run_in(tmp_path / "full", scenes, steps=4, save_every=1),
        checkpoint.write,
        iter([False, True, True, True, False]),
    )
    monkeypatch.setattr(
        checkpoint, "write", lambda *given: full() if next(failing) else write(*given)
    )
    assert same(whole, train(run))
    assert kept(run) == ["step_00000001", "step_00000004"]
    assert "step 2 not saved" in capsys.readouterr().err


@pytest.mark.slow
def test_the_last_save_that_fails_twice_is_an_error(tmp_path, scenes, monkeypatch):
    run = run_in(tmp_path / "full", scenes, steps=2, save_every=1)
    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(OSError, match="No space left on device"):
        train(run)
