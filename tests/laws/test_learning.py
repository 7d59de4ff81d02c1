"""Losses reach the orders of later epochs, wherever training stops and however it is split; and
classes are learned."""

import shutil
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from gigamask.cli.main import main
from gigamask.data.loader import BatchJob, SampleSource
from gigamask.data.mask_sampling import MaskFilters
from gigamask.evaluation.clicks import evaluate_clicks
from gigamask.interfaces import LossSnapshot, Sampler, SampleTable
from gigamask.masks.rle import RLEMasks
from gigamask.records import SampleRef
from gigamask.rng import make_rng
from gigamask.samplers.batch_sampler import SampleSequence, iter_segments
from gigamask.samplers.hard_examples import LossWeighted, Replay
from gigamask.samplers.loss_history import LossHistory
from gigamask.synthetic.scenes import SyntheticScene, seeded, write_scenes
from gigamask.training.optim import AdamW
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.tasks import SamTask
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.trainer import train
from gigamask.types import RandomSpec
from gigamask.workflows.open_data import open_or_build_temporary
from tests.laws.test_training import run_in
from tests.little import COMPACT, little_compact
from tests.ranks import fork


@dataclass(frozen=True)
class Sensitive(Sampler):
    """An order that changes with every loss in the loss history."""

    per_epoch: int = 5

    @property
    def decay(self) -> float:
        return 0.5

    def order(self, table: SampleTable, epoch: int, history: LossSnapshot) -> np.ndarray:
        seen = (
            np.nan_to_num(history.losses, nan=-1.0).tobytes()
            + history.seen.tobytes()
            + np.nan_to_num(history.epoch_losses).tobytes()
        )
        return make_rng(epoch, "sensitive", *seen[:200]).integers(table.count, size=self.per_epoch)


def loss_of(number: int, item: int) -> float:
    return np.nan if number % 7 == 3 else item + number / 8


def plainly(count: int, per_epoch: int, batch: int, steps: int) -> list[int]:
    """Items by definition: an epoch's order sees the losses before the step it starts in."""
    sampler, sequence, orders = Sensitive(per_epoch), [], {}
    known, seen, of_epochs = [np.nan] * count, [-1] * count, {}
    for start in range(0, steps * batch, batch):
        means = [np.mean(of_epochs.get(epoch, [np.nan])) for epoch in range(start // per_epoch)]
        snapshot = LossSnapshot(
            np.array(known, np.float32), np.array(seen, np.int32), np.array(means, np.float64)
        )
        seen_losses: dict[int, list[float]] = {}
        for number in range(start, start + batch):
            epoch, position = divmod(number, per_epoch)
            if not position:
                orders[epoch] = sampler.order(SampleTable(count, {}), epoch, snapshot)
            item = int(orders[epoch][position])
            sequence.append(item)
            loss = loss_of(number, item)
            if not np.isnan(loss):
                seen_losses.setdefault(item, []).append(loss)
                of_epochs.setdefault(epoch, []).append(loss)
                seen[item] = epoch
        for item, losses in seen_losses.items():
            known[item] = float(
                np.float32(
                    np.mean(losses)
                    if np.isnan(known[item])
                    else 0.5 * known[item] + 0.5 * np.mean(losses)
                )
            )
    return sequence


def visited(
    history: LossHistory, per_epoch: int, batch: int, micro: int, world: int, first: int, steps: int
) -> list[int]:
    """The same from step `first` on, as training does: ranks read a segment ahead of its losses."""
    sequences = [
        SampleSequence(Sensitive(per_epoch), SampleTable(len(history.losses), {}), copied(history))
        for _ in range(world)
    ]
    cut = [
        iter_segments(sequence, first * batch, batch, micro, rank, world)
        for rank, sequence in enumerate(sequences)
    ]
    taken: list[int] = []
    while len(taken) < steps * batch:
        ahead = [list(next(legs_of_rank)) for legs_of_rank in cut]
        for of_ranks in zip(*ahead, strict=True):
            start, rows = of_ranks[0].samples_before, np.empty(batch, np.int64)
            for group in of_ranks:
                for ref in (ref for refs in group.micro_batches for ref in refs):
                    rows[ref.batch_index] = ref.row
            taken += rows.tolist()
            for sequence in sequences:
                sequence.record_losses(
                    start,
                    np.array(
                        [loss_of(start + place, row) for place, row in enumerate(rows.tolist())]
                    ),
                )
            if len(taken) == steps * batch:
                take_after(history, sequences[0])
                return taken
    return taken


def copied(history: LossHistory) -> LossHistory:
    return LossHistory.from_arrays(
        {name: array.copy() for name, array in history.arrays().items()}, "", history.decay, ""
    )


def take_after(history: LossHistory, sequence: SampleSequence) -> None:
    history.__dict__.update(sequence._history.__dict__)


@given(
    count=st.integers(1, 9),
    per_epoch=st.integers(1, 13),
    batch=st.integers(1, 9),
    micro=st.integers(1, 4),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stop=st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_an_epoch_sees_all_steps_before_its_first_and_stopping_changes_nothing(
    count, per_epoch, batch, micro, worlds, stop
):
    history = LossHistory.empty("", count, 0.5)
    before = visited(history, per_epoch, batch, micro, worlds[0], 0, stop) if stop else []
    after = visited(copied(history), per_epoch, batch, micro, worlds[1], stop, 6)
    assert before + after == plainly(count, per_epoch, batch, stop + 6)


def test_losses_of_real_training_decide_the_next_order(tmp_path, scenes):
    """The history holds mean losses of samples, and the sampler orders later epochs by them."""
    sampler = LossWeighted(per_epoch=6, ema=0.5, temperature=0.1)
    run = run_in(tmp_path / "run", scenes, sampler=sampler, batch_size=3, steps=2)
    state = train(run)
    items, history, index = (
        SampleTable(len(state.loss_history.losses), {}),
        state.loss_history,
        open_index(run),
    )
    first = sampler.order(items, 0, LossSnapshot.empty(items.count))[np.arange(6)]
    assert np.flatnonzero(np.isfinite(history.losses)).tolist() == sorted(set(first.tolist()))
    onward = TrainData(run, index, state.cursor, history).batches()
    names = [name for batches in islice(onward, 2) for batch in batches for name in batch.names]
    after = sampler.order(items, 1, history.snapshot)[np.arange(6)]
    assert names == [index.entry_name(row) for row in after.tolist()]
    assert not np.array_equal(
        after, sampler.order(items, 1, LossSnapshot.empty(items.count))[np.arange(6)]
    )


def test_weights_multiply_losses_but_not_counts_or_loss_history(tmp_path, scenes):
    run = run_in(tmp_path / "run", scenes, batch_size=2, micro_batch_size=2)
    (batch,) = next(TrainData(run, open_index(run)).batches())
    task, gradients, losses = SamTask(run.prompts, run.loss, 3), [], []
    for weights in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], [2.0, 0.5]):
        state = TrainState.initialize(run, torch.device("cpu"))
        state.model.double()
        state = TrainState.from_model(state.model, run)
        done = step(
            task, state, [replace(batch, weights=torch.tensor(weights))], 2, 0.0, None
        ).result()
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
        losses.append(done.losses)
    whole, left, right, mixed = gradients
    assert torch.allclose(left + right, whole, rtol=1e-9, atol=1e-12)
    assert torch.allclose(2 * left + 0.5 * right, mixed, rtol=1e-9, atol=1e-12)
    assert all(np.allclose(each, losses[0]) for each in losses)


def gradient(run, state, source, ref) -> np.ndarray:
    """The gradient of one step that consists of this sample alone, in fifty random directions."""
    done = step(
        SamTask(run.prompts, run.loss, 64),
        state,
        [source.batch(BatchJob((ref,), 0, 1))],
        1,
        0.0,
        None,
    ).result()
    assert not done.skipped
    whole = torch.cat([p.grad.flatten() for p in state.model.parameters()])
    return (
        torch.from_numpy(make_rng(0, "directions").normal(size=(50, len(whole)))) @ whole
    ).numpy()


def test_importance_weights_make_the_gradient_unbiased(tmp_path, scenes):
    """Weighted samples have the mean gradient of all items, and unweighted ones have not."""
    run = run_in(tmp_path / "run", scenes, batch_size=1, micro_batch_size=1)
    source = SampleSource(
        str(open_index(run).folder),
        run.sample_config,
        RandomSpec(0, run.prompts.num_uniforms, run.model.depth),
    )
    state = TrainState.from_model(
        TrainState.initialize(run, torch.device("cpu")).model.double(), run
    )
    count = len(source.index)
    every = np.stack([gradient(run, state, source, SampleRef(0, row, row)) for row in range(count)])
    history = LossHistory.empty("", count, 0.0)
    history.update(np.arange(count), np.zeros(count, int), np.linalg.norm(every, axis=1))
    history.take_snapshot(1)
    sampler = LossWeighted(per_epoch=4000, importance=True, temperature=0.3, floor=0.05)
    orders = [
        sampler.order(SampleTable(count, {}), epoch, history.snapshot) for epoch in range(400)
    ]
    items, weights = (
        np.concatenate([getattr(order, each) for order in orders]) for each in ("items", "weights")
    )
    # What a step does with a weight is what this sum does with it.
    assert np.allclose(
        gradient(run, state, source, SampleRef(0, 3, 3, weight=1.75)), 1.75 * every[3], rtol=1e-9
    )
    truth = every.mean(0)
    for weighted, off in ((True, False), (False, True)):
        samples = every[items] * (weights[:, None] if weighted else 1.0)
        errors = np.abs(samples.mean(0) - truth) / (samples.std(0) / np.sqrt(len(samples)))
        assert (errors.max() > 10) == off, "in standard errors, of fifty directions"
        assert off or errors.max() < 4


def history_in(out: str) -> dict[str, np.ndarray]:
    return load_file(sorted(Path(out).glob("checkpoints/step_*"))[-1] / "ledger.safetensors")


@pytest.mark.long
@pytest.mark.parametrize(
    "sampler",
    [LossWeighted(per_epoch=8, importance=True), Replay(per_epoch=7, share=0.4, percentile=50.0)],
)
def test_two_ranks_learn_what_one_learns_and_one_goes_on_where_two_stopped(
    tmp_path, scenes, sampler
):
    """Two processes train as one: the same samples and loss history, up to rounding."""
    alone = train(run_in(tmp_path / "alone", scenes, sampler=sampler, steps=8, batch_size=4))
    run = run_in(tmp_path / "both", scenes, sampler=sampler, steps=8, batch_size=4, save_every=4)
    fork(2, main, ["train", "--resume", run.out])
    weights = load_file(Path(run.out) / "checkpoints" / "step_00000008" / "model.safetensors")
    assert all(
        np.allclose(tensor.numpy(), weights[name], atol=2e-4)
        for name, tensor in alone.model.state_dict().items()
    )
    both = history_in(run.out)
    shutil.rmtree(Path(run.out) / "checkpoints" / "step_00000008")
    after = train(replace(run, loader=replace(run.loader, workers=1))).loss_history.arrays()
    for name, array in alone.loss_history.arrays().items():
        for other in (both, after):
            assert np.allclose(
                other[name], array, rtol=0 if name in ("seen", "counts") else 1e-3, equal_nan=True
            ), name


def two_kinds(seed: int, number: int, long_side: tuple[int, int]) -> SyntheticScene:
    """Four objects on gray noise: orange discs and blue squares."""
    generator = make_rng(seed, "two kinds", number)
    pixels = generator.integers(100, 160, (64, 64, 3), dtype=np.uint8)
    ys, xs = np.mgrid[:64, :64]
    masks = []
    drawn = generator.permutation(["disc", "disc", "square", "square"]).tolist()
    for kind, corner in zip(drawn, ((16, 16), (16, 48), (48, 16), (48, 48)), strict=True):
        y, x = np.array(corner) + generator.integers(-3, 4, 2)
        radius = int(generator.integers(7, 12))
        far_y, far_x = abs(ys - y), abs(xs - x)
        far = np.hypot(far_y, far_x) if kind == "disc" else np.maximum(far_y, far_x)
        color = (200, 170, 60) if kind == "disc" else (60, 80, 170)
        masks.append(far <= radius)
        pixels[masks[-1]] = color + generator.integers(-30, 31, (masks[-1].sum(), 3))
    masks = RLEMasks.from_dense(np.array(masks))
    points = masks.sample_points(generator.random((4, 1)))[:, 0]
    return SyntheticScene(pixels, masks, np.ones(4), np.ones(4), points, tuple(drawn))


@pytest.mark.long
def test_classes_of_other_images_are_learned(tmp_path):
    """After one click and by the box, far above the most frequent class."""
    for name, images in (("train", 48), ("test", 12)):
        write_scenes(tmp_path / name, images, seeded(two_kinds, images))
    run = run_in(
        tmp_path / "run",
        tmp_path / "train",
        little_compact,
        model=replace(COMPACT, class_names=("disc", "square")),
        steps=30,
        batch_size=6,
        micro_batch_size=6,
        masks_per_chunk=24,
        optimizer=AdamW(lr=3e-3),
        save_every=100,
    )
    model = train(run).model
    with open_or_build_temporary(tmp_path / "test") as index:
        found = evaluate_clicks(model, index, MaskFilters()).summary()["class_accuracy"]
        assert index.manifest.categories == {"disc": 24, "square": 24}
    assert found["masks"] == 48
    assert min(found["1"], found["box"]) > 0.85
