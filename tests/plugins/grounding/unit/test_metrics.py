"""Metrics of queries against definitions on pixels, and baselines against what they stand for."""

import math

import numpy as np
import pytest

from gigamask.masks.rle import RLEMasks
from gigamask.plugins.grounding.data import open_queries
from gigamask.plugins.grounding.metrics import (
    ImageMasks,
    PositionPrior,
    chance_metrics,
    mask_positions,
    query_metrics,
)
from gigamask.plugins.grounding.queries import Query
from tests.errors import error_line


def masks_of(seed, count=6):
    """Overlapping discs and some noise, none of them empty."""
    generator, (y, x) = np.random.default_rng(seed), np.mgrid[:20, :30]
    centres, radii = generator.uniform((2, 2), (18, 28), (count, 2)), generator.uniform(2, 8, count)
    dense = np.hypot(y - centres[:, :1, None], x - centres[:, 1:, None]) < radii[:, None, None]
    return dense & (generator.random(dense.shape) < 0.9)


def deepest(mask):
    """The pixel farthest from all that is not in the mask, the image's border included; every one
    of equals."""
    outside = np.argwhere(~np.pad(mask, 1)) - 1
    inside = np.argwhere(mask)
    far = np.hypot(*(inside[:, None] - outside).transpose(2, 0, 1)).min(1)
    return {(int(y), int(x)) for y, x in inside[far > far.max() - 1e-6]}


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_what_they_are_called(seed):
    generator, dense = np.random.default_rng(seed), masks_of(seed)
    image = ImageMasks.from_masks(RLEMasks.from_dense(dense))
    right = sorted(generator.choice(6, generator.integers(1, 5), replace=False).tolist())
    told = generator.normal(size=7)
    found = query_metrics(told, right, image)
    order = sorted(range(6), key=lambda number: -told[number])
    first = dense[order[0]]
    ious = [(first & dense[each]).sum() / (first | dense[each]).sum() for each in right]
    chosen = set(np.flatnonzero(told[:-1] > told[-1]))
    assert found["top_1"] == (order[0] in right)
    assert found["top_3"] == any(number in right for number in order[:3])
    assert found["iou"] == pytest.approx(max(ious))
    assert found["refused"] == (told[-1] >= max(told[:-1]))
    assert found["answered"] == (order[0] in right and told[order[0]] > told[-1])
    overlap = len(chosen & set(right))
    assert found["set_f1"] == pytest.approx(2 * overlap / (len(chosen) + len(right)))
    points = deepest(first)
    hits = {any(dense[number][point] for number in right) for point in points}
    assert found["pointing"] in hits
    assert "absent" not in found
    nothing = query_metrics(told, [], image)
    assert nothing == {"absent": found["refused"], "answered": found["refused"]}


def test_of_equal_scores_the_first_counts_and_none_comes_first():
    image = ImageMasks.from_masks(RLEMasks.from_dense(masks_of(0, 3)))
    assert query_metrics(np.array([1.0, 1.0, 0.0, 0.0]), [1], image)["top_1"] == 0
    assert query_metrics(np.array([1.0, 0.0, 0.0, 1.0]), [0], image)["refused"] == 1


def test_an_image_without_masks_refuses():
    image = ImageMasks.from_masks(RLEMasks.from_dense(np.zeros((0, 4, 5), bool)))
    assert (
        query_metrics(np.array([0.3]), [], image)
        == chance_metrics([], image)
        == {"absent": 1.0, "answered": 1.0}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, right",
    [(6, [1]), (6, [0, 2, 5]), (2, [1]), (6, [0, 1, 2, 3, 4]), (1, [0]), (5, [])],
)
def test_chance_level_is_the_mean_of_many_random_rankings(count, right):
    generator = np.random.default_rng(0)
    image = ImageMasks.from_masks(RLEMasks.from_dense(masks_of(3, count)))
    draws = [np.append(generator.random(count), -1.0) for _ in range(1000)]
    told = [query_metrics(scores, right, image) for scores in draws]
    expected = chance_metrics(right, image)
    for name, value in expected.items():
        values = [each[name] for each in told]
        error = 4 * np.std(values) / math.sqrt(1000) + 1e-9
        assert np.mean(values) == pytest.approx(value, abs=error), name
    assert expected.keys() == told[0].keys() - {"set_f1"}


def test_the_prior_knows_where_and_how_large_and_how_often_absent(small):
    trained = [
        Query(None, image, text, right)
        for image, text, right in (
            ("sa_0", "small", (0,)),
            ("sa_0", "large", (2,)),
            ("sa_0", "gone", ()),
            ("sa_1", "half", ()),
            ("sa_0", "half", (1,)),
            ("sa_1", "large", (2,)),
        )
    ]
    prior = PositionPrior.fit(open_queries(small, trained), small)
    for text, best in (("small", 0), ("large", 2), ("half", 1)):
        scores = prior.scores(text, small, 1)
        assert (scores[:-1].argmax(), scores[-1]) == (best, -np.inf)
    assert prior.scores("gone", small, 1)[-1] == np.inf
    right = ((0, 0), (0, 2), (0, 1), (1, 2))
    where = np.stack([mask_positions(small, row)[number] for row, number in right])
    assert prior.mean == pytest.approx(where.mean(0))
    assert prior.std == pytest.approx(where.std(0) + 1e-6)
    away = (mask_positions(small, 1) - where.mean(0)) / (where.std(0) + 1e-6)
    assert prior.scores("new", small, 1)[:-1] == pytest.approx(-(away**2).sum(1))
    assert mask_positions(small, 0)[0] == pytest.approx([4.5 / 100, 0, math.log(10 / 1000) / 4])
    with error_line("prior"):
        PositionPrior.fit(open_queries(small, trained[2:4]), small)
