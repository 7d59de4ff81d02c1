"""The running average of the weights: its formula, its names and what a model has of it."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from gigamask.recipes import mae_tiny
from gigamask.records import DataCursor
from gigamask.training import ema, step, trainer
from gigamask.training.state import TrainState
from tests.errors import error_line
from tests.laws.test_training import run_in
from tests.little import little

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two layers of one matrix, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))


def fail_within(average: ema.Average, model: nn.Module) -> None:
    with average.applied(model):
        raise ZeroDivisionError


def test_the_average_is_that_of_the_formula():
    run = replace(little(), ema=0.3)
    state, draw = TrainState.initialize(run, CPU), torch.Generator().manual_seed(0)
    expected = {name: p.detach().double() for name, p in state.model.named_parameters()}
    for number in range(6):
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=draw))
        state.update_average(run.ema)
        state.advance(DataCursor(number))
        decay = min(0.3, (1 + number) / (10 + number))
        for name, parameter in state.model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
    assert state.average.keys() == expected.keys()
    for name, average in state.average.items():
        assert average.dtype == torch.float32
        assert torch.allclose(average.double(), expected[name], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_trainable_parameters_are_averaged_in_any_training():
    assert TrainState.initialize(little(), CPU).average is None
    for run in (mae_tiny(), replace(little(), freeze=("prompt_encoder",))):
        model = TrainState.initialize(run, CPU).model
        state = TrainState.from_model(model, replace(run, ema=0.9, init=None))
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert state.average.keys() == trained
        assert trained < model.state_dict().keys()
        own = {p.data_ptr() for p in model.parameters()}
        assert not own & {average.data_ptr() for average in state.average.values()}


def test_tied_and_frozen_parameters_and_buffers():
    model = Tied()
    average = ema.Average.of(model)
    assert set(average) == {"first.weight", "first.bias", "second.bias"}
    with torch.no_grad():
        model.first.weight.zero_()
    kept = average["first.weight"].clone()
    named = average.by_state_name(model)
    assert named["second.weight"] is named["first.weight"] is average["first.weight"]
    assert set(named) == {"first.weight", "first.bias", "second.weight", "second.bias"}
    parameter, memory = model.first.weight, model.first.weight.data_ptr()
    with average.applied(model):
        assert torch.equal(model.second.weight, kept)
    with pytest.raises(ZeroDivisionError):
        fail_within(average, model)
    assert model.first.weight is model.second.weight is parameter
    assert parameter.data_ptr() == memory
    assert not parameter.any()
    assert torch.equal(average["first.weight"], kept)


@pytest.mark.slow
def test_a_skipped_step_moves_the_average_towards_weights_that_it_leaves(
    tmp_path, scenes, monkeypatch
):
    """The second of three steps has a gradient of NaN."""
    accumulate, launch, seen = step.accumulate, trainer._launch, []

    def spoil(task, model, *given) -> None:
        accumulate(task, model, *given)
        if len(seen) == 1:
            next(model.parameters()).grad.fill_(math.nan)

    def note(config, task, state, *given) -> trainer._Launched:
        launched = launch(config, task, state, *given)
        seen.append((ema.Average.of(state.model), copy.deepcopy(state.average)))
        return launched

    monkeypatch.setattr(step, "accumulate", spoil)
    monkeypatch.setattr(trainer, "_launch", note)
    trainer.train(run_in(tmp_path / "run", scenes, steps=3, ema=0.9))
    (first, average), (second, after), (third, _) = seen
    name = "mask_decoder.iou_token.weight"
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(second[name], third[name])
    assert torch.equal(after[name], average[name].lerp(second[name], 1 - 2 / 11))


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, math.nan])
def test_decays_that_are_none_are_refused(decay):
    with error_line(rf"^--ema must be between 0 and 0.99\d* .got {decay}.$"):
        replace(little(), data=("x",), ema=decay).check()
