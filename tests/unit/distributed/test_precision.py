"""Half precision: the scale of fp16's losses, and that steps in it are those of float32, nearly."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from gigamask.distributed.precision import (
    LossScaler,
    autocast,
    choose_device,
    choose_precision,
    float32_products,
)
from gigamask.models import manifest
from gigamask.training import checkpoint
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, accumulate, step
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from tests.errors import error_line
from tests.laws.test_training import run_in, same

CPU = torch.device("cpu")


def test_the_scale_halves_at_an_overflow_and_doubles_when_long_none_came():
    scale = LossScaler()
    for _ in range(1999):
        scale.update(True)
    assert (scale.value, scale.growth_tracker) == (2.0**16, 1999)
    scale.update(True)
    assert (scale.value, scale.growth_tracker) == (2.0**17, 0)
    scale.update(True)
    scale.update(False)
    assert (scale.value, scale.growth_tracker) == (2.0**16, 0)


@pytest.mark.parametrize(
    "name, kind", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_products_are_made_in_the_precision(name, kind):
    for outer in ("fp32", "bf16"):  # or within an autocast of the caller's
        with autocast(outer, CPU), autocast(name, CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


def batch_of(run):
    (batch,) = next(TrainData(run, open_index(run)).batches())
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("precision, near", [("bf16", 0.2), ("fp16", 0.02)])
def test_gradients_in_half_precision_are_nearly_those_of_float32(tmp_path, scenes, precision, near):
    run, found = run_in(tmp_path, scenes, micro_batch_size=3), {}
    batch = batch_of(run)
    for each, scale in (("fp32", 1.0), (precision, 2.0**10 if precision == "fp16" else 1.0)):
        state = TrainState.initialize(run, CPU)
        accumulate(
            replace(run, precision=each).task(CPU),
            state.model,
            batch,
            StepMetrics.zero(3, torch.zeros(())),
            scale,
        )
        found[each] = torch.cat([p.grad.flatten() for p in state.model.parameters()]) / scale
    assert float((found[precision] - found["fp32"]).norm()) < near * float(found["fp32"].norm())


@pytest.fixture
def half(tmp_path, scenes):
    """A state for training in fp16, and what makes one step of it at a scale."""
    run = run_in(tmp_path, scenes, precision="fp16", micro_batch_size=3)
    state, batch = TrainState.initialize(run, CPU), batch_of(run)

    def step_at(scale: float):
        state.scale = LossScaler(scale)
        return step(run.task(CPU), state, [batch], 3, 1e-3, 1.0).result()

    return state, step_at


@pytest.mark.slow
def test_an_overflow_costs_an_update_and_half_of_the_scale(half):
    state, step_at = half
    before = [parameter.clone() for parameter in state.model.parameters()]
    done = step_at(2.0**60)
    assert (done.skipped, done.overflow, state.scale.value) == (True, True, 2.0**59)
    assert all(map(torch.equal, before, state.model.parameters()))
    assert done.record["loss_scale"] == 2.0**60
    done = step_at(2.0**8)
    assert (done.skipped, done.overflow, state.scale.growth_tracker) == (False, False, 1)
    assert not all(map(torch.equal, before, state.model.parameters()))


@pytest.mark.slow
def test_what_is_not_finite_at_a_scale_of_one_is_no_overflow(half):
    state, step_at = half
    next(state.model.mask_decoder.parameters()).data.fill_(np.nan)
    done = step_at(1.0)
    assert (done.skipped, done.overflow) == (True, False)


@pytest.mark.long
@pytest.mark.usefixtures("no_shape_checks")
def test_a_training_in_fp16_that_overflows_at_first_goes_on_bit_for_bit(
    tmp_path, scenes, monkeypatch
):
    """More overflows in a row than skipped steps allowed; the scale is kept with the weights."""
    monkeypatch.setattr(
        LossScaler,
        "__init__",
        lambda self, value=2.0**30, tracker=0: self.__dict__.update(
            value=value, growth_tracker=tracker
        ),
    )
    run = run_in(tmp_path / "run", scenes, precision="fp16", steps=20, save_every=15, batch_size=1)
    whole = train(run)
    assert whole.scale.value < 2.0**20
    told = manifest.verify(checkpoint.newest(tmp_path / "run"))
    assert told["scale"] == {"value": whole.scale.value, "good": whole.scale.growth_tracker}
    again = run_in(
        tmp_path / "again", scenes, precision="fp16", steps=15, save_every=15, batch_size=1
    )
    train(again)
    assert same(whole, train(replace(again, steps=20)))


def test_a_gpu_of_apples_computes_in_float32_unless_asked_otherwise(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    mps = choose_device("mps")
    assert mps.type == "mps"
    assert choose_device("auto") == CPU, "it is used when it is named"
    assert choose_precision("auto", mps) == "fp32"
    assert isinstance(autocast("fp32", mps), contextlib.nullcontext)
    half = autocast(choose_precision("fp16", mps), mps)
    assert isinstance(half, torch.autocast)
    assert (half.device, half.fast_dtype) == ("mps", torch.float16)


def test_devices_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [choose_device(name) for name in ("cpu", "cuda", "cuda:0")] == [
        torch.device("cpu"),
        torch.device("cuda"),
        torch.device("cuda", 0),
    ]
    with error_line(r"--device.*'gpu'"):
        choose_device("gpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with error_line(r"--device mps: .* no GPU of Apple's"):
        choose_device("mps")
    with error_line(r"--device cuda:1.*1 GPU"):
        choose_device("cuda:1")


def test_tf32_is_for_a_training_alone():
    before = torch.get_float32_matmul_precision()
    for tf32, inside in ((True, "high"), (False, before)):
        with float32_products(tf32):
            assert torch.get_float32_matmul_precision() == inside
        assert torch.get_float32_matmul_precision() == before


def test_a_number_is_answered_with_the_name_of_a_gpu():
    with error_line(r"got '1'\); perhaps cuda:1; leave it out"):
        choose_device("1")
