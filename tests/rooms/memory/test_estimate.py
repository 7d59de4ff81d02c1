"""The estimate that is often written of a batch, with its own figures."""

import pytest

from gigamask.memory.estimate import beside, table, written


def test_the_write_ups_figures():
    """Two images of 1500 x 2250 with 100 masks, ViT-H: 2.72 + 2.5 + 10.0 + 2.5 + 5.0 = 22.72 GB."""
    found = written(2, (1500, 2250), 100, 2.5)
    figures = {"batch data": 2.72, "weights": 2.5, "activations": 10.0, "gradients": 2.5, "optimizer": 5.0, "in all": 22.72}
    assert {kind: round(held / 1e9, 2) for kind, held in found.items()} == figures


def test_it_stands_beside_what_is_planned():
    kinds = {"weights": 10, "gradients": 20, "optimizer": 30, "batch": 1, "activations": 5, "at work": 4}
    found = beside(written(1, (10, 10), 1, 1.0), {"forward": kinds, "rounds": dict.fromkeys(kinds, 3 * 10**9)}, "rounds")
    assert found["planned"]["batch data"] == 3 * 10**9
    assert found["planned"]["in all"] == 18 * 10**9
    assert found["written"]["in all"] == pytest.approx(6e9, rel=0.001)
    assert table(found).splitlines() == [
        "GB              as written  planned here",
        "batch data            0.00          3.00",
        "weights               1.00          3.00",
        "activations           2.00          3.00",
        "gradients             1.00          3.00",
        "optimizer             2.00          3.00",
        "at work                             3.00",
        "in all                6.00         18.00",
    ]
