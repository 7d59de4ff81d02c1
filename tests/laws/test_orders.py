"""What holds for every order and every way of cutting it."""

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.samplers.split import groups
from gigamask.samplers.uniform import Uniform
from gigamask.seams import Items

CUTS = st.fixed_dictionaries({"per_epoch": st.integers(1, 40), "batch": st.integers(1, 17), "seed": st.integers(0, 3)})


def sequence(per_epoch: int, seed: int, length: int) -> list[tuple[int, int, int]]:
    """The epochs' orders one after the other, written down plainly."""
    epochs = range(-(-length // per_epoch))
    orders = [Uniform(seed).order(Items(per_epoch, {}), epoch, None) for epoch in epochs]
    return [(epoch, position, int(item)) for epoch in epochs for position, item in enumerate(orders[epoch])][:length]


def steps(count: int, per_epoch: int, seed: int, **cut) -> list:
    return list(islice(groups(lambda epoch: Uniform(seed).order(Items(per_epoch, {}), epoch, None), per_epoch, **cut), count))


@given(st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**40))
def test_an_order_is_a_permutation(count, epoch, seed):
    assert np.array_equal(np.sort(Uniform(seed).order(Items(count, {}), epoch, None)), np.arange(count))


@given(CUTS, st.integers(1, 5), st.integers(1, 6))
def test_ranks_and_micro_batches_partition_each_step(cut, world, micro):
    per_epoch, batch, seed = cut["per_epoch"], cut["batch"], cut["seed"]
    plain = sequence(per_epoch, seed, 4 * batch)
    ranks = [steps(4, per_epoch, seed, samples=0, batch=batch, micro=micro, rank=rank, world=world) for rank in range(world)]
    for step in range(4):
        mine = [[visit for part in rank[step].micros for visit in part] for rank in ranks]
        assert all(mine[rank] == plain[step * batch : (step + 1) * batch][rank::world] for rank in range(world))
        assert {len(rank[step].micros) for rank in ranks} == {-(-batch // (world * micro))}
        assert all(len(part) <= micro for rank in ranks for part in rank[step].micros)
        assert {(rank[step].start, rank[step].samples) for rank in ranks} == {(step * batch, (step + 1) * batch)}


@given(CUTS, st.integers(1, 3), st.integers(0, 6))
@settings(max_examples=50)
def test_resuming_at_any_step_gives_the_same_rest(cut, world, taken):
    per_epoch, batch, seed = cut["per_epoch"], cut["batch"], cut["seed"]
    for rank in range(world):
        whole = steps(taken + 3, per_epoch, seed, samples=0, batch=batch, micro=2, rank=rank, world=world)
        cursor = whole[taken - 1].samples if taken else 0
        assert steps(3, per_epoch, seed, samples=cursor, batch=batch, micro=2, rank=rank, world=world) == whole[taken:]
