"""Averaged adapters on two processes, rates after a resume, a head that is never chosen."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gigamask.distributed.world import destroy_world, init_world
from gigamask.models.lora_config import LoRA
from gigamask.models.manifest import MODEL, newest
from gigamask.models.weight_files import read_safetensors
from gigamask.training.checkpoint import LAST
from gigamask.training.optim import AdamW, WarmupCosine, WarmupMultiStep
from gigamask.training.state import TrainState
from gigamask.training.trainer import train
from tests.journeys.runs import lines
from tests.little import little
from tests.ranks import fork

Weights = dict[str, torch.Tensor]


def config(out: Path, scenes: Path, **changes: object):
    options = {"batch_size": 2, "micro_batch_size": 1, "save_every": 1, "keep": 9} | changes
    return replace(little(), data=(str(scenes),), out=str(out), **options).check()


def adapted(out: Path, scenes: Path, weights: Path, steps: int):
    options = {"lora": LoRA(2), "ema": 0.7, "init": str(weights), "steps": steps}
    return config(out, scenes, **options)


def saved(run: Path) -> Weights:
    """Averages, and what the training goes on from."""
    return {
        f"{file}/{name}": tensor
        for file in (MODEL, LAST)
        for name, tensor in read_safetensors(newest(run) / file)[0].items()
    }


def two_processes(out: str, scenes: str, weights: str) -> None:
    world = init_world(os.environ, torch.device("cpu"))
    for name, ends in (("whole", (3,)), ("resumed", (1, 3))):
        for steps in ends:
            train(adapted(Path(out) / name, Path(scenes), Path(weights), steps), world)
    destroy_world(world)


def test_averaged_adapters_are_those_of_one_process(scenes, weights, tmp_path):
    fork(2, two_processes, str(tmp_path), str(scenes), str(weights))
    train(adapted(tmp_path / "one", scenes, weights, 3))
    one, whole, resumed = (saved(tmp_path / name) for name in ("one", "whole", "resumed"))
    assert one.keys() == whole.keys() == resumed.keys()
    assert any("lora_B" in name for name in one)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
        if not name.endswith("k_proj.bias"):  # softmax cancels it: its gradient is rounding
            torch.testing.assert_close(tensor, one[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_resumed_run_has_the_rates_of_an_undisturbed_one(scenes, tmp_path):
    """Those of the new number of steps, if it has changed."""
    schedule = WarmupCosine(warmup_steps=1)
    for steps in (2, 4):
        train(config(tmp_path, scenes, schedule=schedule, steps=steps))
    rates = {line["step"]: line["lr"] for line in lines(tmp_path) if "lr" in line}
    expected = [schedule.factor(step, 2) for step in (0, 1)]
    expected += [schedule.factor(step, 4) for step in (2, 3)]
    peak = little().optimizer.lr
    assert [rates[step] / peak for step in (1, 2, 3, 4)] == pytest.approx(expected, rel=0.01)


def test_a_head_that_is_never_chosen_only_decays(scenes, tmp_path):
    """As in torch, since its gradient is zero; nothing becomes NaN."""
    head = "mask_decoder.output_hypernetworks_mlps.3."
    optimizer = AdamW(lr=1e-2, weight_decay=0.5)
    run = config(tmp_path / "run", scenes, optimizer=optimizer, schedule=WarmupMultiStep(0, ()))
    state = TrainState.initialize(run, torch.device("cpu"))
    names = [name for name, _ in state.model.named_parameters() if name.startswith(head)]
    last = state.model.get_parameter(max(n for n in names if n.endswith("bias")))
    last.data.fill_(1e4)  # masks that are nowhere near
    first: Weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    state.model.save_pretrained(tmp_path / "first")
    after = train(replace(run, init=str(tmp_path / "first"), steps=3).check()).model
    for name, parameter in after.named_parameters():
        assert parameter.isfinite().all(), name
        if name.startswith(head):
            kept = (1 - 1e-2 * 0.5) ** 3 if name.endswith("weight") else 1.0
            torch.testing.assert_close(parameter.detach(), first[name] * kept)
