"""The step over a task whose loss is known."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from gigamask.contracts import Batch, Chance, Cursor, Terms
from gigamask.data.loader import collate
from gigamask.seams import Task
from gigamask.train.state import TrainState
from gigamask.train.step import step
from tests.little import little

EMPTY = collate([], (), little().assembly, Chance(0, 2, 2), 0.0, Cursor(3))


@dataclass(frozen=True)
class Pull(Task):
    """Pulls one bias down: a loss of `slope` times its sum, `pieces` times, each counting `count` masks."""

    slope: float
    pieces: int = 2
    count: float = 5.0

    def terms(self, model, batch: Batch, cut) -> Iterator[Terms]:
        shared = cut(model.mask_decoder.iou_token.weight * 2)
        for _ in range(self.pieces):
            yield Terms(shared.sum() * self.slope, torch.tensor(self.count), {"iou": torch.tensor(1.5)}, torch.zeros(0))


@pytest.fixture
def state():
    run = replace(little(), data=("x",))
    return TrainState.begin(run, torch.device("cpu"))


def test_sums_are_divided_once_and_the_cut_carries_gradients(state):
    record = step(Pull(slope=3.0), state, [EMPTY, EMPTY], 1, rate=1e-3, clip_norm=None).record
    gradient = state.model.mask_decoder.iou_token.weight.grad
    # Four pieces of slope 3 over the doubled token, divided by four times five masks.
    assert torch.allclose(gradient, torch.full_like(gradient, 4 * 3.0 * 2 / 20))
    assert record["iou"] == pytest.approx(4 * 1.5 / 20)
    assert record["gradient_norm"] == pytest.approx(1.2 * gradient.numel() ** 0.5)
    assert record["skipped"] == 0
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * state.optimizers[0].param_groups[0]["lr_scale"])


def test_clipping_is_by_the_global_norm(state):
    step(Pull(slope=300.0), state, [EMPTY], 1, rate=1e-3, clip_norm=0.5)
    norm = torch.stack([p.grad.norm() for p in state.model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("task", [Pull(slope=float("nan")), Pull(slope=float("inf")), Pull(slope=1.0, pieces=0)])
def test_a_step_that_is_not_finite_or_has_no_mask_changes_nothing(state, task):
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    done = step(task, state, [EMPTY], 1, rate=1e-3, clip_norm=1.0)
    assert done.skipped
    assert done.record["skipped"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in state.model.state_dict().items())
    assert not state.optimizer_tensors()
    step(Pull(slope=1.0), state, [EMPTY], 1, rate=1e-3, clip_norm=1.0)
    assert not torch.equal(before["mask_decoder.iou_token.weight"], state.model.mask_decoder.iou_token.weight)
