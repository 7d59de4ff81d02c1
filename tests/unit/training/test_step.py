"""The step over a task whose loss is known."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gigamask.data.loader import collate
from gigamask.distributed.precision import LossScaler
from gigamask.distributed.world import World, destroy_world, init_world
from gigamask.interfaces import Optimizer, Task
from gigamask.profiling.dry_run import SCALARS, blank_batch
from gigamask.records import DataCursor
from gigamask.training.optim import AdamW, MuonAdamW
from gigamask.training.state import TrainState
from gigamask.training.step import StepMetrics, step
from gigamask.types import Batch, LossSums, RandomSpec
from tests.errors import error_line
from tests.little import little
from tests.ranks import fork

CPU = torch.device("cpu")
EMPTY = collate([], (), little().sample_config, RandomSpec(0, 2, 2), 0.0, DataCursor(3))


@dataclass(frozen=True)
class Pull(Task):
    """A loss of `slope` times the sum of a bias, in `pieces` terms of `count` masks each."""

    slope: float
    pieces: int = 2
    count: float = 5.0

    def compute_losses(self, model, batch: Batch, detach) -> Iterator[LossSums]:
        shared = detach(model.mask_decoder.iou_token.weight * 2)
        for _ in range(self.pieces):
            yield LossSums(
                shared.sum() * self.slope,
                torch.tensor(self.count),
                {"iou": torch.tensor(1.5)},
                torch.zeros(0),
                image=torch.zeros(0, dtype=torch.int64),
            )


@pytest.fixture
def state():
    run = replace(little(), data=("x",))
    return TrainState.initialize(run, CPU)


def test_sums_are_divided_once_and_the_cut_carries_gradients(state):
    record = (
        step(Pull(slope=3.0), state, [EMPTY, EMPTY], 1, lr=1e-3, grad_clip=None).result().record
    )
    gradient = state.model.mask_decoder.iou_token.weight.grad
    # Four pieces of slope 3 over the doubled token, divided by four times five masks.
    assert torch.allclose(gradient, torch.full_like(gradient, 4 * 3.0 * 2 / 20))
    assert record["iou"] == pytest.approx(4 * 1.5 / 20)
    assert record["grad_norm"] == pytest.approx(1.2 * gradient.numel() ** 0.5)
    assert record["skipped"] == 0
    assert state.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        1e-3 * state.optimizers[0].param_groups[0]["lr_scale"]
    )


def test_clipping_is_by_the_global_norm(state):
    step(Pull(slope=300.0), state, [EMPTY], 1, lr=1e-3, grad_clip=0.5)
    norm = torch.stack([p.grad.norm() for p in state.model.parameters()]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-4)


class HostReads(TorchFunctionMode):
    """Notes what a GPU must be waited for: numbers that are read."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in SCALARS or func in (torch.Tensor.numpy, torch.Tensor.cpu):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_only_the_result_waits_for_the_device(state):
    with HostReads() as reads:
        launched = step(Pull(slope=300.0), state, [EMPTY, EMPTY], 1, lr=1e-3, grad_clip=0.5)
        assert not reads.seen
        assert launched.result().record["iou"] == pytest.approx(0.3)
        assert reads.seen


@dataclass(frozen=True)
class SGD(Optimizer):
    """One that waits for the decision to skip."""

    def build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters())]


def assert_unchanged(state, before) -> None:
    assert all(
        torch.equal(before[name], tensor) for name, tensor in state.model.state_dict().items()
    )
    assert not any(tensor.any() for tensor in state.optimizer_tensors().values())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [AdamW(), MuonAdamW(muon_kernels=True), SGD()])
@pytest.mark.parametrize(
    "task", [Pull(slope=float("nan")), Pull(slope=float("inf")), Pull(slope=1.0, pieces=0)]
)
def test_a_step_that_is_not_finite_or_has_no_mask_changes_nothing(task, optimizer):
    run = replace(little(), data=("x",), optimizer=optimizer)
    state = TrainState.initialize(run, CPU)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    done = step(task, state, [EMPTY], 1, lr=1e-3, grad_clip=1.0).result()
    assert done.skipped
    assert done.record["skipped"] == 1
    assert_unchanged(state, before)
    step(Pull(slope=1.0), state, [EMPTY], 1, lr=1e-3, grad_clip=1.0)
    assert not torch.equal(
        before["mask_decoder.iou_token.weight"], state.model.mask_decoder.iou_token.weight
    )


def totals(terms: list[float], weights: list[float]) -> StepMetrics:
    found = StepMetrics.zero(len(terms), torch.zeros(()))
    found.counts, found.weights, found.count = (
        torch.tensor(terms),
        torch.tensor(weights),
        torch.tensor(sum(terms)),
    )
    return found


def test_without_weights_sums_are_divided_by_the_count():
    assert totals([3.0, 5.0, 0.0], [1.0, 1.0, 0.0]).divisor() == 8
    assert totals([0.0, 0.0], [0.0, 0.0]).divisor() == 1


def test_weights_change_nothing_where_all_samples_have_equally_many_masks():
    assert totals([4.0, 4.0, 4.0, 0.0], [0.5, 3.0, 0.25, 0.0]).divisor() == pytest.approx(12)


def test_weighted_sums_are_divided_by_the_count_of_an_average_batch():
    """Of two samples, of which the one with many masks was drawn three times too often."""
    assert totals([4.0, 64.0], [3.0, 1.0]).divisor() == pytest.approx(2 * (3 * 4 + 64) / 4)


def test_nan_loss_affects_only_its_own_sample():
    blank = blank_batch(little().sample_config, little().random_spec, 2, 4)
    batch = replace(blank, batch_index=torch.tensor([1, 0]))
    found = StepMetrics.zero(2, torch.zeros(()))
    losses = torch.tensor([1.0, 2.0, float("nan"), 1.0])
    term = LossSums(torch.tensor(0.0), torch.tensor(4.0), {}, losses, image=batch.mask_image)
    found.add([term], batch)
    assert found.losses[1] == 3
    assert found.losses[0].isnan()


@pytest.mark.slow
def test_more_parts_than_are_exchanged_are_refused(state):
    found = StepMetrics.zero(1, torch.zeros(()))
    found.sums = {str(number): torch.tensor(1.0) for number in range(17)}
    with error_line(r"at most 16 .*17"):
        found.all_reduce(World())


def sums_of_ranks() -> None:
    """What each process of the test below does: one has no mask, or both have other sums."""
    world = init_world(os.environ, CPU)
    own = ({}, {"loss": 3.0, "iou": 0.5}), ({"loss": 1.0, "a": 2.0}, {"loss": 3.0, "b": 4.0})
    whole = {"loss": 3.0, "iou": 0.5}, {"loss": 4.0, "a": 2.0, "b": 4.0}
    for given, expected in zip(own, whole, strict=True):
        found = StepMetrics.zero(1, torch.zeros(()))
        found.sums = {name: torch.tensor(value) for name, value in given[world.rank].items()}
        found.count += 1
        logged = found.all_reduce(world)
        copied = [found.count, found.losses, found.counts, found.weights]
        found = found.on_host(world, logged, copied)
        assert {name: float(value) for name, value in found.sums.items()} == expected
        assert found.means() == {name: value / 2 for name, value in expected.items()}
    destroy_world(world)


@pytest.mark.slow
def test_processes_with_other_sums_have_the_same_afterwards():
    fork(2, sums_of_ranks)


def one_rank_overflows(run) -> None:
    """What each process of the test below does."""
    world = init_world(os.environ, CPU)
    state = TrainState.initialize(run, CPU)
    state.scale = LossScaler(4.0)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    for bad in (float("nan"), float("inf")):
        task = Pull(bad) if world.rank else Pull(1.0, pieces=0)
        done = step(task, state, [EMPTY], 1, 1e-3, 1.0, world).result()
        outcome = repr(sorted(done.record.items())), done.skipped, done.overflow
        assert world.gather(outcome) == [outcome] * 2
        assert done.skipped
        assert "loss" in done.record
    assert_unchanged(state, before)
    destroy_world(world)


@pytest.mark.slow
def test_both_processes_skip_a_step_that_one_of_them_spoils():
    fork(2, one_rank_overflows, replace(little(), data=("x",)))
