"""A step reads no value of a tensor, which would wait for the GPU.

Fake tensors have no values, so reading one raises an error: `item`, `bool`, `nonzero`, an index of
bool.
"""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from gigamask.profiling.dry_run import blank_batch, to_fake
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.optim import AdamW, MuonAdamW
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.tasks import SamTask
from gigamask.types import Batch
from tests.little import little, little_classes
from tests.tiers import long_after


def blank_masks(batch: Batch, start: int, stop: int) -> torch.Tensor:
    """Replaces `Batch.dense`, which reads offsets that are always on the CPU."""
    return torch.zeros(stop - start, batch.mask_size, batch.mask_size, dtype=torch.bool)


def run_step(run, monkeypatch, masks=6):
    """Takes a step of two micro-batches: one of two chunks, if it has six masks, and one of one."""
    monkeypatch.setattr(Batch, "dense", blank_masks)
    model = run.build("meta")
    batches = [blank_batch(run.sample_config, run.random_spec, 2, count) for count in (masks, 2)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = TrainState.from_model(to_fake(model, "cuda"), run)
        step(run.task(torch.device("cpu")), state, batches, 2, 1e-3, 1.0)


RECIPES = [little, little_classes]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", long_after(1, RECIPES))
def test_no_value_is_read(recipe, monkeypatch):
    run_step(replace(recipe(), optimizer=AdamW()), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_another_optimizer_reads_none(recipe, monkeypatch):
    """After one round; the rounds of all optimizers are the same."""
    first = InteractiveSchedule(clicks=0, mask_only_rounds=False)
    run = replace(recipe(), optimizer=MuonAdamW(muon_kernels=True), prompts=first)
    run_step(run, monkeypatch, masks=2)


@pytest.mark.slow
def test_a_read_value_is_noticed(monkeypatch):
    make_targets = SamTask.make_targets

    def reading(self, batch, part, mask_prompt_size):
        targets, random_inputs = make_targets(self, batch, part, mask_prompt_size)
        assert not targets.masks.any()
        return targets, random_inputs

    monkeypatch.setattr(SamTask, "make_targets", reading)
    with pytest.raises(DataDependentOutputException):
        run_step(little(), monkeypatch)
