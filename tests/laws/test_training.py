"""A resumed run equals one that was not stopped; micro-batches change no gradient."""

import json
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
    one, other = (state.loss_history.arrays() if state.loss_history else {} for state in (a, b))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
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
    """SIGKILL between two checkpoints; the run is finished with another number of workers."""
    loader = replace(little().loader, workers=workers)
    whole = train(run_in(tmp_path / "whole", scenes, sampler=sampler))
    run = run_in(tmp_path / "killed", scenes, sampler=sampler, loader=loader)
    process = multiprocessing.get_context("fork").Process(
        target=die_after_twelve, args=(run,)
    )  # need not start Python anew
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert checkpoint.newest(Path(run.out)).name == "step_00000010"
    assert same(whole, train(replace(run, loader=replace(loader, workers=2 - workers))))


def die_after_twelve(run) -> None:
    log_step = MetricsLogger.log_step

    def dying(self, step, images, record):
        log_step(self, step, images, record)
        if step == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    MetricsLogger.log_step = dying
    train(run)


def test_each_record_has_the_epoch(tmp_path, scenes):
    """A dozen images in steps of three: an epoch every four steps, also after resuming."""
    run = run_in(tmp_path / "run", scenes, steps=3, save_every=3)
    train(run)
    train(replace(run, steps=6))
    length = TrainData(run, open_index(run)).samples_per_epoch
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    epochs = {line["step"]: line["epoch"] for line in lines if "loss" in line}
    assert epochs == {step: pytest.approx(3 * step / length, abs=1e-6) for step in range(1, 7)}


def gradients(run, micro_batch_size: int, masks_per_chunk: int) -> tuple[list[torch.Tensor], float]:
    state = TrainState.from_model(
        TrainState.initialize(run, torch.device("cpu")).model.double(), run
    )
    task, metrics = (
        SamTask(run.prompts, run.loss, masks_per_chunk),
        StepMetrics.zero(run.batch_size, next(state.model.parameters())),
    )
    for batch in next(
        TrainData(replace(run, micro_batch_size=micro_batch_size), open_index(run)).batches()
    ):
        accumulate(task, state.model, batch, metrics)
    return [p.grad / metrics.count for p in state.model.parameters()], metrics.means()["loss"]


def test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes):
    """Micro-batches and chunks of masks of any size give the gradient of the whole batch."""
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
