"""A resumed run equals one that was not stopped; micro-batches change no gradient."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gigamask import config_files
from gigamask.interfaces import EvaluationResult, Evaluator
from gigamask.models import manifest, state_dict
from gigamask.models.sam.image_encoder import EncoderBlock
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.random import Random
from gigamask.training import checkpoint
from gigamask.training.config import check_resume
from gigamask.training.logging import MetricsLogger
from gigamask.training.optim import MuonAdamW, WarmupMultiStep
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.checkpoints import resume
from tests.errors import error_line
from tests.journeys.runs import lines
from tests.little import SPEC, little, little_classes
from tests.tiers import long_after


def run_in(folder: Path, scenes: Path, recipe=little, **changes):
    run = replace(
        recipe(), out=str(folder), data=(str(scenes),), **{"steps": 20, "save_every": 5, **changes}
    )
    config_files.save_config(run)
    return run


def same(a: TrainState, b: TrainState) -> bool:
    ours, theirs = (
        state.model.state_dict()
        | state.optimizer_tensors()
        | {f"average/{name}": tensor for name, tensor in (state.average or {}).items()}
        for state in (a, b)
    )
    assert ours.keys() == theirs.keys()
    one, other = (state.loss_history.arrays() if state.loss_history else {} for state in (a, b))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name], equal_nan=True) for name in one)
    return (a.step, a.cursor) == (b.step, b.cursor) and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def exit_code_of(function: Callable, run) -> int | None:
    """How a process ends that calls a function with a run; it need not start Python anew."""
    process = multiprocessing.get_context("fork").Process(target=function, args=(run,))
    process.start()
    process.join()
    return process.exitcode


SKIPS_BY_STEP = {
    "drop_path_mode": "batch",
    "model": replace(SPEC, depth=4, drop_path_rate=0.6),
    "seed": 2,
}
SAMPLERS = [
    (Random(), 0),
    (Random(), 2),
    (LossWeighted(per_epoch=8, importance=True), 2),
    (Replay(per_epoch=7, share=0.4, percentile=50.0), 0),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("sampler, workers", long_after(1, SAMPLERS))
def test_ten_steps_killed_and_ten_more_are_twenty(tmp_path, scenes, sampler, workers):
    """SIGKILL between two checkpoints; the run is finished with another number of workers."""
    loader = replace(little().loader, workers=workers)
    whole = train(run_in(tmp_path / "whole", scenes, sampler=sampler))
    run = run_in(tmp_path / "killed", scenes, sampler=sampler, loader=loader)
    assert exit_code_of(die_after_twelve, run) == -signal.SIGKILL
    assert checkpoint.newest(Path(run.out)).name == "step_00000010"
    assert same(whole, train(replace(run, loader=replace(loader, workers=2 - workers))))


def tensors_in(run, file: str) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest(Path(run.out)) / file)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.long
def test_an_average_of_the_weights_goes_on_bit_for_bit(tmp_path, scenes):
    """Killed behind a checkpoint; equal in every file of weights and of optimizer state."""
    options = {"ema": 0.5, "freeze": ("prompt_encoder",), "init": str(tmp_path / "init")}
    start = replace(little(), seed=3).build()
    (tmp_path / "init").mkdir()
    state_dict.save_weights(
        state_dict.to_official(start), start.config, tmp_path / "init" / "model.safetensors"
    )
    whole = run_in(tmp_path / "whole", scenes, **options)
    ended = train(whole)
    run = run_in(tmp_path / "killed", scenes, **options)
    assert exit_code_of(die_after_twelve, run) == -signal.SIGKILL
    assert same(ended, train(run))
    files = checkpoint.MODEL, checkpoint.LAST, checkpoint.OPTIMIZER
    for file in files:
        ours, theirs = tensors_in(whole, file), tensors_in(run, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file
    averaged, last = (tensors_in(run, file) for file in files[:2])
    assert all(torch.equal(last[name], own) for name, own in ended.model.state_dict().items())
    assert averaged.keys() == last.keys()
    assert ended.average.keys() == {
        name for name, own in ended.model.named_parameters() if own.requires_grad
    }
    for name, own in averaged.items():
        assert torch.equal(own, ended.average.get(name, last[name])), name
        assert name in ended.average or torch.equal(own, start.state_dict()[name])
    assert not all(torch.equal(averaged[name], last[name]) for name in averaged)


def test_an_average_changes_no_training_and_without_one_there_is_no_file(tmp_path, scenes):
    plain = run_in(tmp_path / "plain", scenes, steps=4)
    averaged = run_in(tmp_path / "averaged", scenes, steps=4, ema=0.9)
    ended, other = train(plain), train(averaged)
    assert ended.average is None
    assert same(ended, replace(other, average=None))
    folder = checkpoint.newest(Path(plain.out))
    assert not (folder / checkpoint.LAST).exists()
    assert set(manifest.verify(folder)["files"]) == {checkpoint.MODEL, checkpoint.OPTIMIZER}
    assert checkpoint.LAST in manifest.verify(checkpoint.newest(Path(averaged.out)))["files"]


@dataclass(frozen=True)
class Size(Evaluator):
    """Scores the size of the weights."""

    interval: int = 2

    def open(self, config, world):
        def evaluate(model) -> EvaluationResult:
            return EvaluationResult({"size": size(dict(model.named_parameters()))}, "size")

        return evaluate


def size(weights: dict[str, torch.Tensor]) -> float:
    return sum(float(weights[name].detach().double().abs().sum()) for name in sorted(weights))


def test_averaged_weights_are_evaluated_and_loaded(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, steps=4, ema=0.9)
    ended = train(replace(run, evaluation=Size()))
    folder, names = checkpoint.newest(Path(run.out)), ended.average.keys()
    loaded, _ = state_dict.read_weights(run.out)
    averaged = size({name: loaded[name] for name in names})
    raw = size({name: ended.model.state_dict()[name] for name in names})
    score = manifest.verify(folder)["score"]
    assert score == pytest.approx(averaged, rel=1e-12)
    assert score != pytest.approx(raw, rel=1e-6)
    last, _ = state_dict.read_weights(folder / checkpoint.LAST)
    assert size({name: last[name] for name in names}) == pytest.approx(raw, rel=1e-12)
    damaged = bytearray((folder / checkpoint.LAST).read_bytes())
    damaged[-9] ^= 1
    (folder / checkpoint.LAST).write_bytes(damaged)
    with error_line(r"last.safetensors.*damaged"):
        manifest.verify(folder)


@pytest.mark.parametrize("before, now", [(0.0, 0.9), (0.9, 0.0)])
def test_an_average_cannot_begin_or_end_on_resume(tmp_path, scenes, before, now):
    run = run_in(tmp_path / "run", scenes, steps=2, save_every=2, ema=before)
    train(run)
    other = replace(run, ema=now)
    with error_line(rf"^--ema was {before} .* is now {now}: .*--init"):
        check_resume(run, other, allow_data_change=True)
    with error_line(rf"average of the weights, but --ema is {now}; .*--init"):
        resume(other, torch.device("cpu"))
    if before:
        changed = replace(run, ema=0.99)
        assert check_resume(run, changed, allow_data_change=False) == {"ema": (0.9, 0.99)}


@pytest.mark.parametrize("recipe", [little_classes])
def test_other_models_go_on_where_they_stopped(tmp_path, scenes, recipe):
    """Two steps, and two more, are four; with the recipe's optimizer and workers."""
    changes = {
        "recipe": recipe,
        "save_every": 2,
        "schedule": WarmupMultiStep(warmup_steps=1, milestones=()),
        "optimizer": MuonAdamW(lr=1e-3, muon_kernels=True),
    }
    whole = train(run_in(tmp_path / "whole", scenes, steps=4, **changes))
    run = run_in(tmp_path / "stopped", scenes, steps=2, **changes)
    half = train(run)
    assert not same(whole, half)
    assert same(whole, train(replace(run, steps=4, loader=replace(run.loader, workers=1))))


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
    epochs = {line["step"]: line["epoch"] for line in lines(Path(run.out)) if "loss" in line}
    assert epochs == {step: pytest.approx(3 * step / length, abs=1e-6) for step in range(1, 7)}


def gradients(run, micro_batch_size: int, masks_per_chunk: int) -> tuple[list[torch.Tensor], float]:
    state = TrainState.from_model(
        TrainState.initialize(run, torch.device("cpu")).model.double(), run
    )
    task, metrics = (
        replace(run.task(torch.device("cpu")), masks_per_chunk=masks_per_chunk),
        StepMetrics.zero(run.batch_size, next(state.model.parameters())),
    )
    for batch in next(
        TrainData(replace(run, micro_batch_size=micro_batch_size), open_index(run)).batches()
    ):
        accumulate(task, state.model, batch, metrics)
    learned = [p.grad for p in state.model.parameters() if p.requires_grad]
    return [grad / metrics.count for grad in learned], metrics.means()["loss"]


@pytest.mark.parametrize("changes", [{}, {"recipe": little_classes}, SKIPS_BY_STEP])
def test_how_a_batch_is_cut_changes_nothing(tmp_path, scenes, changes):
    """Micro-batches and chunks of masks of any size give the gradient of the whole batch."""
    run = run_in(tmp_path / "run", scenes, batch_size=5, **changes)
    whole, loss = gradients(run, micro_batch_size=5, masks_per_chunk=1000)
    largest = max(float(g.abs().max()) for g in whole)
    for micro, masks in ((1, 1000), (2, 3), (3, 1)):
        cut, cut_loss = gradients(run, micro, masks)
        assert cut_loss == pytest.approx(loss, rel=1e-12)
        assert (
            max(float((a - b).abs().max()) for a, b in zip(whole, cut, strict=True))
            < 1e-11 * largest
        )


def test_branches_that_a_step_skips_give_the_gradient_of_branches_times_zero(
    tmp_path, scenes, monkeypatch
):
    run = run_in(tmp_path / "run", scenes, batch_size=5, **SKIPS_BY_STEP)
    skipping, loss = gradients(run, micro_batch_size=2, masks_per_chunk=1000)
    computed = []

    def plain(self, x, drop_path=None):
        for index, (norm, branch) in enumerate(((self.norm1, self.attn), (self.norm2, self.mlp))):
            kept = [uniforms[index] >= self.drop_rate for uniforms in drop_path]
            computed.append(kept)
            factors = torch.tensor(kept, dtype=x.dtype)[:, None, None, None]
            x = x + branch(norm(x)) * factors / (1 - self.drop_rate)
        return x

    monkeypatch.setattr(EncoderBlock, "forward", plain)
    multiplied, same_loss = gradients(run, micro_batch_size=5, masks_per_chunk=1000)
    assert loss == pytest.approx(same_loss, rel=1e-12)
    assert [sum(kept) for kept in computed].count(0) in range(1, 4)
    assert all(len(set(kept)) == 1 for kept in computed)
    largest = max(float(each.abs().max()) for each in multiplied)
    for one, other in zip(skipping, multiplied, strict=True):
        assert (one - other).abs().max() < 1e-11 * largest
