from dataclasses import replace

import pytest

from gigamask.training.config import limit_warmup
from gigamask.training.schedule import WarmupCosine, WarmupMultiStep  # as recipes of users do
from tests.errors import error_line
from tests.little import little


def test_sam_drops_where_the_paper_says():
    schedule = WarmupMultiStep()
    steps = 90_000
    assert schedule.factor(0, steps) == pytest.approx(1 / 250)
    assert schedule.factor(124, steps) == pytest.approx(0.5)
    assert schedule.factor(249, steps) == schedule.factor(59_999, steps) == 1
    assert schedule.factor(60_000, steps) == pytest.approx(0.1)
    assert schedule.factor(86_665, steps) == pytest.approx(0.1)
    assert schedule.factor(86_666, steps) == pytest.approx(0.01)


def test_cosine_starts_after_the_warm_up_and_ends_at_final():
    schedule = WarmupCosine(warmup_steps=10, min_lr_ratio=0.1)
    assert schedule.factor(4, 110) == pytest.approx(0.5)
    assert schedule.factor(10, 110) == pytest.approx(1)
    assert schedule.factor(60, 110) == pytest.approx(0.55)
    assert schedule.factor(110, 110) == pytest.approx(0.1)
    assert schedule.factor(500, 110) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [WarmupMultiStep, WarmupCosine])
def test_a_warm_up_of_less_than_nothing_is_refused(schedule):
    with error_line(r"^warmup.*-5"):
        schedule(warmup_steps=-5)


def test_no_warm_up():
    assert WarmupMultiStep(warmup_steps=0).factor(0, 10) == 1


@pytest.mark.parametrize("schedule", [WarmupMultiStep(), WarmupCosine()])
def test_a_shortened_training_reaches_its_rate(schedule):
    short = limit_warmup(replace(little(), schedule=schedule, steps=200), 5000)
    assert short.schedule == replace(schedule, warmup_steps=50)
    assert max(short.schedule.factor(step, 200) for step in range(200)) == pytest.approx(
        1, abs=1e-3
    )
    for steps in (1000, 5000, 9000):
        long = replace(little(), schedule=schedule, steps=steps)
        assert limit_warmup(long, 5000).schedule == schedule
    asked = replace(little(), schedule=schedule, steps=1000)
    assert asked.with_(steps=100).schedule.warmup_steps == 25
    assert asked.with_(steps=100, schedule__warmup_steps=80).schedule.warmup_steps == 80


def test_factors_and_ratios_must_be_fractions():
    with error_line(r"^min_lr_ratio.*2.0"):
        WarmupCosine(min_lr_ratio=2.0)
    with error_line(r"^gamma.*-0.1"):
        WarmupMultiStep(gamma=-0.1)
    with error_line(r"^milestones.*60000.0"):
        WarmupMultiStep(milestones=(0.5, 60000.0))
