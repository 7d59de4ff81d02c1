"""Confidences against another fit, and calibration across halves of the images."""

import json
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from gigamask.plugins.grounding.calibration import (
    MIN_QUERIES,
    Confidence,
    ScoredQueries,
    best_threshold,
    calibrate,
    calibrate_refusal,
)
from tests.errors import error_line


def likelihood(theta, x, y):
    z = theta[0] * x + theta[1]
    return np.logaddexp(0, z).sum() - (y * z).sum() + 0.005 * ((theta[0] - 1) ** 2 + theta[1] ** 2)


@pytest.mark.parametrize("seed", range(6))
def test_confidence_is_a_logistic_regression(seed):
    """Against a minimiser of scipy's, and with many samples against what made them."""
    generator = np.random.default_rng(seed)
    scale, shift = generator.uniform(0.2, 3), generator.uniform(-4, 2)
    spread = generator.choice([0.5, 2, 10])
    x = spread * generator.normal(size=4000)
    y = generator.random(4000) < 1 / (1 + np.exp(-(scale * x + shift)))
    found = Confidence.fit(x, y)
    best = minimize(likelihood, (1.0, 0.0), (x, y), method="BFGS", options={"gtol": 1e-8})
    assert (found.scale, found.shift) == pytest.approx(best.x, rel=1e-3, abs=1e-3)
    assert likelihood((found.scale, found.shift), x, y) <= best.fun + 1e-6
    assert found.scale == pytest.approx(scale, abs=0.4 * scale)
    assert found(x)[0] == pytest.approx(1 / (1 + math.exp(-(found.scale * x[0] + found.shift))))


@pytest.mark.parametrize("apart", [0.01, 1.0, 1000.0])
def test_confidence_of_all_correct_predictions_is_finite(apart):
    x = np.concatenate([np.linspace(-2, -1, 50), np.linspace(1, 2, 50)]) * apart
    y = x > 0
    found = Confidence.fit(x, y)
    assert math.isfinite(found.scale)
    assert math.isfinite(found.shift)
    assert ((found(x) > 0.5) == y).all()


def test_confidence_of_uninformative_or_inverted_logits():
    assert Confidence.fit(np.array([1.0, 2.0]), np.array([True, True])) == Confidence()
    assert Confidence.fit(np.array([1.0, 2.0]), np.array([False, False])) == Confidence()
    assert Confidence.fit(np.array([]), np.array([], bool)) == Confidence()
    generator = np.random.default_rng(0)
    x = generator.normal(size=500)
    y = generator.random(500) < 0.2 / (1 + np.exp(3 * x))
    found = Confidence.fit(x, y)
    assert found.scale == 0
    assert found(x) == pytest.approx(np.full(500, y.mean()))


def test_confidence_of_far_logits_does_not_overflow():
    assert Confidence()(np.array([-1e4, 0.0, 1e4])).tolist() == [0, 0.5, 1]


def random_queries(seed=0, queries=72, images=6):
    """Logits of masks, which are right, and the image of each query; right masks score higher."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(2, 9, queries)
    is_target = [
        generator.random(count) < (0.4 if number % 4 else 0) for number, count in enumerate(counts)
    ]
    logits = [
        generator.normal(size=count) + target
        for count, target in zip(counts, is_target, strict=True)
    ]
    return logits, is_target, np.sort(generator.integers(0, images, queries))


def test_calibration_is_of_the_other_images_fit():
    logits, is_target, images = random_queries()
    confidence, summaries = calibrate(ScoredQueries(logits, is_target, images))
    halves = [np.flatnonzero(images % 2 == side) for side in (0, 1)]
    fits = [
        Confidence.fit(*(np.concatenate([of[i] for i in half]) for of in (logits, is_target)))
        for half in halves
    ]
    assert fits[0] != fits[1]
    pairs = zip(images.tolist(), logits, strict=True)
    expected = np.concatenate([fits[1 - image % 2](row) for image, row in pairs])
    everything = np.concatenate(is_target)
    bias = (expected - everything).mean()
    assert summaries["calibrated"]["bias"] == pytest.approx(bias, abs=1e-9)
    assert summaries["calibrated"]["expected_error"] < summaries["uncalibrated"]["expected_error"]
    assert confidence == Confidence.fit(np.concatenate(logits), everything)
    few = calibrate(first_of(logits, is_target, images))
    assert (few[0], set(few[1])) == (Confidence(), {"uncalibrated"})
    alone = calibrate(ScoredQueries(logits, is_target, np.zeros(len(logits), np.int64)))
    assert set(alone[1]) == {"uncalibrated"}, "one image has no other half"


def first_of(logits, is_target, images):
    few = slice(MIN_QUERIES - 1)
    return ScoredQueries(logits[few], is_target[few], images[few])


def balance(shares):
    return shares["absent"] + shares["right"]


def test_a_threshold_has_the_most_right_answers_on_the_other_images():
    logits, is_target, images = random_queries()
    logits = [row + 3 for row in logits]  # uncalibrated, few are refused
    queries = ScoredQueries(logits, is_target, images)
    threshold, shares = calibrate_refusal(queries)
    candidates = [*queries.best, queries.best.min() - 1]
    assert balance(queries.shares(threshold)) == max(balance(queries.shares(c)) for c in candidates)
    expected = {"absent": [], "refused": [], "right": []}
    for side in (0, 1):
        half = images % 2 == side
        other = best_threshold(
            *(each[~half] for each in (queries.best, queries.absent, queries.right))
        )
        refused = queries.best <= other
        expected["absent"] += refused[half & queries.absent].tolist()
        expected["refused"] += refused[half & ~queries.absent].tolist()
        expected["right"] += (queries.right & ~refused)[half & ~queries.absent].tolist()
    assert shares["calibrated"] == {
        name: pytest.approx(np.mean(flags)) for name, flags in expected.items()
    }
    assert shares["uncalibrated"] == queries.shares(0.0)
    few, only = calibrate_refusal(first_of(logits, is_target, images))
    assert (few, set(only)) == (0.0, {"uncalibrated"})


@pytest.mark.parametrize("seed", range(20))
def test_a_threshold_that_gains_nothing_on_the_other_images_stays_0(seed):
    """The scores say nothing about whether a mask fits."""
    generator = np.random.default_rng(seed)
    logits, is_target, images = random_queries(seed)
    queries = ScoredQueries([generator.normal(size=len(row)) for row in logits], is_target, images)
    threshold, shares = calibrate_refusal(queries)
    before, after = shares["uncalibrated"], shares["calibrated"]
    is_better = balance(after) > balance(before) and (
        after["absent"] - after["refused"] >= before["absent"] - before["refused"]
    )
    assert is_better or threshold == 0


def test_only_right_answers_are_worth_keeping():
    """Without a single right answer, everything is refused; without an absent query, nothing."""
    best, none = np.array([3.0, 1.0, 2.0, 2.0]), np.zeros(4, bool)
    absent = np.array([True, False, True, False])
    assert best_threshold(best, absent, none) >= 3
    assert best_threshold(best, none, ~none) < 1
    assert best_threshold(best, absent, np.array([False, True, False, True])) < 1


def test_a_fitted_confidence_is_kept_with_the_run(tmp_path):
    folder = str(tmp_path)
    assert Confidence.load(folder) == Confidence()
    path = Confidence(1.5, -2.0, 0.5).save(folder)
    assert Confidence.load(folder) == Confidence(1.5, -2.0, 0.5)
    for content in (
        "{",
        "3",
        "{}",
        json.dumps({"scale": "wide", "shift": 0}),
        json.dumps({"scale": 1.5, "shift": 0, "threshold": 0}),
        path.read_text().replace("-2.0", "-2.5"),
    ):
        path.write_text(content)
        with error_line(rf"^{path}: .*--calibrate$"):
            Confidence.load(folder)
