"""The curricula: what is reached when."""

from dataclasses import replace

import numpy as np
import pytest

from gigamask.interfaces import LossSnapshot, SampleTable
from gigamask.samplers.curriculum import AdaptiveCurriculum, Curriculum, argsort_stable
from tests.errors import error_line
from tests.orders import listed

ITEMS = SampleTable(1000, {"difficulty": np.random.default_rng(0).random(1000).astype(np.float32)})
RANK = np.argsort(np.argsort(ITEMS.columns["difficulty"]))


def ledger(*epoch_losses: float, count: int = 1000) -> LossSnapshot:
    return LossSnapshot(
        np.full(count, np.nan, np.float32),
        np.full(count, -1, np.int32),
        np.array(epoch_losses, np.float64),
    )


def test_the_easiest_come_first_and_all_are_reached_and_stay():
    """Where the share is computed anew from another length once warm-up is over, it falls from all
    items back to a third."""
    sampler = Curriculum(epochs=2.0, stages=4)
    hardest = []
    for epoch in range(12):
        order = listed(sampler.order(ITEMS, epoch, None))
        assert len(order) == 1000
        for stage in range(4):
            reached = min(1.0, 0.3 + 0.7 * (epoch + stage / 4) / 2) * 1000
            piece = RANK[order[stage * 250 : (stage + 1) * 250]]
            assert piece.max() < np.ceil(reached)
            hardest.append(reached)
        if epoch >= 2:
            assert np.array_equal(np.sort(order), np.arange(1000))
    assert hardest == sorted(hardest)
    assert hardest[0] == 300
    assert hardest[-1] == 1000


def test_stages_that_reach_equally_many_are_one():
    assert np.array_equal(
        np.sort(listed(Curriculum(start=1.0).order(ITEMS, 0, None))), np.arange(1000)
    )
    assert np.array_equal(
        np.sort(listed(Curriculum(epochs=0.0).order(ITEMS, 3, None))), np.arange(1000)
    )
    counts = np.bincount(
        listed(Curriculum(start=0.004, epochs=1e12).order(ITEMS, 0, None)), minlength=1000
    )
    assert sorted(counts[counts > 0].tolist()) == [250] * 4


def test_items_of_a_stage_are_visited_equally_often():
    order = listed(Curriculum(start=0.03, epochs=10.0, stages=2).order(ITEMS, 0, None))
    counts = np.bincount(RANK[order[:500]])
    assert len(counts) == 30
    assert np.ptp(counts) <= 1


def test_what_is_reached_is_mixed():
    order = listed(Curriculum(start=1.0).order(ITEMS, 0, None))
    assert abs(np.corrcoef(RANK[order], np.arange(1000))[0, 1]) < 0.15


def test_adaptive_fraction_follows_the_losses():
    """As the source does it: after a growth the recent losses are forgotten, and three new ones are
    waited for."""
    sampler = AdaptiveCurriculum()
    low, high = 0.05, 0.3
    assert sampler.share(np.array([])) == 0.3
    assert sampler.share(np.array([low] * 2)) == 0.3
    assert sampler.share(np.array([low] * 3)) == 0.35
    assert sampler.share(np.array([low] * 5)) == 0.35
    assert sampler.share(np.array([low] * 6)) == 0.4
    assert sampler.share(np.array([high] * 50)) == 0.3
    assert sampler.share(np.array([high, low, low])) == 0.3
    assert sampler.share(np.array([high, low, low, low])) == 0.35
    assert sampler.share(np.array([low] * 1000)) == 1.0


def test_epochs_without_a_loss_are_passed_over():
    losses = np.array([np.nan, 0.05, np.nan, 0.05, 0.05, np.nan])
    assert AdaptiveCurriculum().share(losses) == 0.35


def test_only_the_easiest_fraction_is_visited():
    for number, losses in ((300, ()), (350, (0.05,) * 3), (1000, (0.05,) * 60)):
        order = listed(AdaptiveCurriculum().order(ITEMS, len(losses), ledger(*losses)))
        assert len(order) == 1000
        assert np.array_equal(np.unique(RANK[order]), np.arange(number))
    assert np.array_equal(np.sort(order), np.arange(1000))


def test_custom_window_and_growth():
    assert AdaptiveCurriculum(window=1, growth=0.5, threshold=2.0).share(np.array([1.0])) == 0.8
    assert AdaptiveCurriculum().decay == 0.0
    assert Curriculum().decay is None


def test_ranks_are_those_of_a_stable_sort():
    values = np.random.default_rng(0).choice(
        np.array(
            [-np.inf, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.3, 7e8, np.inf, np.nan, -np.nan], np.float32
        ),
        5000,
    )
    assert np.array_equal(argsort_stable(values), np.argsort(values, kind="stable"))
    assert np.array_equal(
        argsort_stable(values.astype(np.float64)), np.argsort(values, kind="stable")
    )
    assert argsort_stable(np.array([3, 1, 2])).tolist() == [1, 2, 0]


def test_no_items_make_no_positions():
    nothing = SampleTable(0, {"difficulty": np.empty(0, np.float32)})
    assert len(Curriculum().order(nothing, 0, None)) == 0
    assert len(AdaptiveCurriculum(per_epoch=3).order(nothing, 0, ledger(count=0))) == 0


@pytest.mark.parametrize("sampler", [Curriculum(), AdaptiveCurriculum()])
def test_difficulty_must_be_known(sampler):
    with error_line(f"^{type(sampler).__name__} needs the column 'difficulty', .*tar"):
        listed(sampler.order(SampleTable(2, {"tar": np.zeros(2)}), 0, ledger(count=2)))


@pytest.mark.parametrize(
    "sampler, field, value",
    [
        (Curriculum(), "start", 0.0),
        (Curriculum(), "start", 1.1),
        (Curriculum(), "start", float("nan")),
        (Curriculum(), "epochs", -1.0),
        (Curriculum(), "epochs", float("inf")),
        (Curriculum(), "stages", 0),
        (AdaptiveCurriculum(), "start", 0.0),
        (AdaptiveCurriculum(), "growth", -0.1),
        (AdaptiveCurriculum(), "threshold", 0.0),
        (AdaptiveCurriculum(), "threshold", float("nan")),
        (AdaptiveCurriculum(), "window", 0),
        (AdaptiveCurriculum(), "per_epoch", 0),
    ],
)
def test_fields_have_limits(sampler, field, value):
    with error_line(rf"^{type(sampler).__name__}.{field} must be .*\(got {value}\)$"):
        replace(sampler, **{field: value})
