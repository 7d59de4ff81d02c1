"""What holds for every order and every way of cutting it."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.interfaces import SampleTable
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from gigamask.samplers.shards import Streamed
from tests.errors import error_line
from tests.orders import iter_steps, listed

CUTS = st.fixed_dictionaries(
    {"per_epoch": st.integers(1, 40), "batch": st.integers(1, 17), "seed": st.integers(0, 3)}
)


def sequence(per_epoch: int, seed: int, length: int) -> list[tuple[int, int, int]]:
    """The epochs' orders one after the other, written down plainly."""
    epochs = range(-(-length // per_epoch))
    orders = [
        listed(Random().order(SampleTable(per_epoch, {}, seed), epoch, None)) for epoch in epochs
    ]
    return [
        (epoch, position, int(item))
        for epoch in epochs
        for position, item in enumerate(orders[epoch])
    ][:length]


def steps(count: int, cut: dict[str, int], consumed: int, *parts: int) -> list:
    """Steps after a number of samples; `parts` are the micro-batch size, the rank and the ranks."""
    order = SampleSequence(Random(), SampleTable(cut["per_epoch"], {}, cut["seed"]))
    return list(islice(iter_steps(order, consumed, cut["batch"], *parts), count))


@given(CUTS, st.integers(1, 5), st.integers(1, 6))
def test_ranks_and_micro_batches_partition_each_step(cut, world, micro):
    per_epoch, batch, seed = cut["per_epoch"], cut["batch"], cut["seed"]
    plain = sequence(per_epoch, seed, 4 * batch)
    ranks = [steps(4, cut, 0, micro, rank, world) for rank in range(world)]
    for step in range(4):
        mine = [[ref[:3] for part in rank[step].micro_batches for ref in part] for rank in ranks]
        assert all(
            mine[rank] == plain[step * batch : (step + 1) * batch][rank::world]
            for rank in range(world)
        )
        assert {len(rank[step].micro_batches) for rank in ranks} == {-(-batch // (world * micro))}
        assert all(len(part) <= micro for rank in ranks for part in rank[step].micro_batches)
        assert {(rank[step].samples_before, rank[step].samples_after) for rank in ranks} == {
            (step * batch, (step + 1) * batch)
        }


@given(CUTS, st.integers(1, 3), st.integers(0, 6))
@settings(max_examples=50)
def test_resuming_at_any_step_gives_the_same_rest(cut, world, taken):
    for rank in range(world):
        whole = steps(taken + 3, cut, 0, 2, rank, world)
        cursor = whole[taken - 1].samples_after if taken else 0
        assert steps(3, cut, cursor, 2, rank, world) == whole[taken:]


TARS = st.lists(st.integers(0, 30), max_size=12)


def tar_items(sizes: list[int]) -> SampleTable:
    return SampleTable(sum(sizes), {"tar": np.repeat(np.arange(len(sizes)), sizes)})


@given(TARS, st.integers(1, 9), st.integers(1, 40), st.integers(0, 3))
def test_a_streamed_order_visits_every_sample_once_and_stays_near_the_reading_head(
    sizes, lanes, buffer, epoch
):
    items = tar_items(sizes)
    order = listed(Streamed(lanes, buffer).order(items, epoch, None))
    assert np.array_equal(np.sort(order), np.arange(items.count))
    assert np.array_equal(order, listed(Streamed(lanes, buffer).order(items, epoch, None)))
    unmixed = listed(Streamed(lanes, 1).order(items, epoch, None))
    starts = np.cumsum([0, *sizes])
    for lane in range(min(lanes, items.count)):
        visited, reading = order[lane::lanes].tolist(), unmixed[lane::lanes]
        place = {item: number for number, item in enumerate(reading.tolist())}
        assert all(abs(place[item] - number) < buffer for number, item in enumerate(visited))
        jumps = reading[1:][np.diff(reading) != 1]
        assert np.isin(jumps, starts).all()  # onward, or to the beginning of another tar


def test_separate_lanes_let_every_worker_read_sequentially():
    items, world, micro, workers = tar_items([100, 100, 100]), 2, 2, 3
    sampler = Streamed(lanes=world * micro * workers, buffer=1)
    for rank in range(world):
        steps = islice(
            iter_steps(SampleSequence(sampler, items), 0, world * micro, micro, rank, world),
            items.count // (world * micro),
        )
        jobs = [refs for group in steps for refs in group.micro_batches]
        for worker in range(workers):
            lanes_read = {
                ref.position % sampler.lanes for refs in jobs[worker::workers] for ref in refs
            }
            assert len(lanes_read) == micro


def test_neighbours_are_mixed_and_epochs_differ():
    items = tar_items([500, 500])
    first, second = (listed(Streamed(1, 100).order(items, epoch, None)) for epoch in (0, 1))
    assert (np.diff(first) == 1).mean() < 0.05
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("fields", [{"lanes": 0}, {"buffer": 0}])
def test_a_streamed_order_needs_a_lane_and_a_buffer(fields):
    (name,) = fields
    with error_line(rf"{name}.*0"):
        Streamed(**fields)
