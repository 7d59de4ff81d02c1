"""However often a training is killed, the same command continues it to the same weights."""

import multiprocessing
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gigamask.models import manifest
from gigamask.samplers.hard_examples import LossWeighted
from gigamask.training.trainer import train
from tests.laws.test_training import run_in, same

KILLS = 30
MOST_S = 120


@pytest.mark.long
def test_thirty_kills_at_any_moment(tmp_path, scenes, record_property):
    """Also while it loads, saves or prunes: each process dies soon after its first checkpoint."""
    record_property("tried", KILLS)
    steps, chance = 90, random.Random(0)
    parts = {
        "steps": steps,
        "save_every": 1,
        "log_every": 100,
        "batch_size": 1,
        "sampler": LossWeighted(per_epoch=8),
    }
    whole = train(run_in(tmp_path / "whole", scenes, **parts))
    run = run_in(tmp_path / "killed", scenes, **parts)
    context = multiprocessing.get_context(
        "fork"
    )  # so that the thirty need not start Python; torch computes with one thread here
    reached, deadline = [], time.monotonic() + MOST_S
    for _ in range(KILLS):
        process = context.Process(target=train, args=(run,))
        process.start()
        before = newest(run)
        while newest(run) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, (
            "it was to be killed before its end; give it more steps"
        )
        reached.append(newest(run))
    assert reached == sorted(reached)
    assert 0 < reached[0] < reached[-1] < steps
    assert same(whole, train(run))
    assert not list((Path(run.out) / "checkpoints").glob(".*.part"))


def newest(run) -> int:
    """Returns the step of the newest checkpoint, 0 without any."""
    found = manifest.list_checkpoints(Path(run.out) / "checkpoints")
    return int(found[-1].name[-8:]) if found else 0


def test_a_killed_run_may_be_resumed_with_other_workers(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, steps=6, save_every=2)
    whole = train(replace(run, out=str(tmp_path / "run")))
    for folder in manifest.list_checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        folder.rename(tmp_path / folder.name)
    assert same(whole, train(replace(run, loader=replace(run.loader, workers=1))))
