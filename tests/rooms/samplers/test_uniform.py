"""The uniform sampler."""

import time

import numpy as np

from gigamask.samplers.uniform import Uniform
from gigamask.seams import Items

ITEMS = Items(1000, {})


def test_orders_differ_between_epochs_and_seeds_and_repeat_themselves():
    orders = [Uniform(seed).order(ITEMS, epoch, None) for seed in (0, 1) for epoch in (0, 1)]
    assert len({order.tobytes() for order in orders}) == 4
    assert np.array_equal(orders[0], Uniform(0).order(ITEMS, 0, None))


def test_nothing_is_left_of_the_order_of_the_items():
    order = Uniform().order(ITEMS, 0, None)
    # A random permutation's correlation with the identity has a standard deviation of 1/sqrt(n) = .03.
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def test_an_epoch_costs_about_what_numpy_needs_to_shuffle():
    """At SA-1B's 11.2 million images that is half a second."""

    def cost(make):
        times = []
        for _ in range(3):
            start = time.process_time()
            make()
            times.append(time.process_time() - start)
        return min(times)

    items = Items(1_000_000, {})
    assert cost(lambda: Uniform().order(items, 0, None)) < 3 * cost(lambda: np.random.default_rng(0).permutation(items.count))
