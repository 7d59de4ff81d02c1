"""Laws of training: a resumed run is the run that was not stopped, and how a batch is cut changes nothing."""

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask import config_files
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.random import Random
from gigamask.training import checkpoint
from gigamask.training.logging import MetricsLogger
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.tasks import SamTask
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.little import little


def run_in(folder: Path, scenes: Path, **changes):
    run = replace(
        little(), out=str(folder), data=(str(scenes),), **{"steps": 20, "save_every": 5, **changes}
    )
    config_files.save_config(run)
    return run


def same(a: TrainState, b: TrainState) -> bool:
    ours, theirs = (
        a.model.state_dict() | a.optimizer_tensors(),
        b.model.state_dict() | b.optimizer_tensors(),
    )
    assert ours.keys() == theirs.keys()
    told, tells = (state.loss_history.arrays() if state.loss_history else {} for state in (a, b))
    assert told.keys() == tells.keys()
    assert all(np.array_equal(told[name], tells[name], equal_nan=True) for name in told)
    return (a.step, a.cursor) == (b.step, b.cursor) and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


SAMPLERS = [
    (Random(), 0),
    (Random(), 2),
    (LossWeighted(per_epoch=8, importance=True), 2),
    (Replay(per_epoch=7, share=0.4, percentile=50.0), 0),
]


@pytest.mark.parametrize(("sampler", "workers"), SAMPLERS)
def test_ten_steps_killed_and_ten_more_are_twenty(tmp_path, scenes, sampler, workers):
    """The first process dies by SIGKILL behind a checkpoint and in front of the next; another worker count finishes the run."""
    loading = replace(little().loader, workers=workers)
    whole = train(run_in(tmp_path / "whole", scenes, sampler=sampler))
    run = run_in(tmp_path / "killed", scenes, sampler=sampler, loading=loading)
    process = multiprocessing.get_context("fork").Process(
        target=die_after_twelve, args=(run,)
    )  # need not start Python anew
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint.newest(Path(run.out)).name == "step_00000010"
    assert same(whole, train(replace(run, loader=replace(loading, workers=2 - workers))))


def die_after_twelve(run) -> None:
    record = MetricsLogger.record

    def dying(self, step, images, figures):
        record(self, step, images, figures)
        if step == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsLogger.record = dying
    train(run)


def gradients(run, micro: int, masks_per_chunk: int) -> tuple[list[torch.Tensor], float]:
    state = TrainState.from_model(
        TrainState.initialize(run, torch.device("cpu")).model.double(), run
    )
    task, totals = (
        SamTask(run.prompts, run.loss, masks_per_chunk),
        StepMetrics.zero(run.batch_size, next(state.model.parameters())),
    )
    for batch in next(TrainData(replace(run, micro_batch_size=micro), open_index(run)).batches()):
        accumulate(task, state.model, batch, totals)
    return [p.grad / totals.count for p in state.model.parameters()], totals.means()["loss"]


def test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes):
    """Micro-batches of any size, the last one smaller, and groups of masks of any size give the whole batch's gradient."""
    run = run_in(tmp_path / "run", scenes, batch_size=5)
    whole, loss = gradients(run, micro_batch_size=5, masks_per_chunk=1000)
    largest = max(float(g.abs().max()) for g in whole)
    for micro, masks in ((1, 1000), (2, 3), (3, 1)):
        cut, cut_loss = gradients(run, micro, masks)
        assert cut_loss == pytest.approx(loss, rel=1e-12)
        assert (
            max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True))
            < 1e-11 * largest
        )
