"""Statistics against the plain way of computing them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.data import tar
from gigamask.data.index import build
from gigamask.datatools import stats as statistics
from gigamask.synthetic import scenes
from tests.unit.datatools.test_convert import members


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    scenes.write(folder, 12, shard_images=5)
    payload = next(iter(members(folder / "sa_000000.tar").values()))
    tar.write(
        folder / "z.tar",
        [("sa_99.jpg", payload), ("sa_98.jpg", payload), ("sa_98.json", b"broken")],
    )
    return build(folder, folder / "index")


@pytest.mark.slow
def test_numbers_are_those_of_the_annotations(index):
    stats = statistics.describe(index)
    annotations = [
        json.loads(raw)
        for path in index.shard_paths[:-1]
        for name, raw in members(path).items()
        if name.endswith(".json")
    ]
    masks = [(mask, each["image"]) for each in annotations for mask in each["annotations"]]
    assert (stats["images"], stats["masks"], stats["tars"]) == (13, len(masks), 4)
    assert (
        stats["images_without_json"],
        stats["images_without_masks"],
        stats["skipped_images"],
    ) == (1, 1, 1)
    shares = np.array([mask["area"] / (image["width"] * image["height"]) for mask, image in masks])
    expected = [
        (shares < 0.01).sum(),
        ((shares >= 0.01) & (shares <= 0.1)).sum(),
        (shares > 0.1).sum(),
    ]
    assert list(stats["granularity"].values()) == expected
    assert list(stats["granularity"]) == ["fine (< 1%)", "medium (1% to 10%)", "coarse (> 10%)"]
    found = stats["distributions"]
    for name, values in {
        "masks per image": [len(each["annotations"]) for each in annotations] + [0],
        "mask area": [mask["area"] for mask, _ in masks],
        "mask area share": shares,
        "predicted_iou": [mask["predicted_iou"] for mask, _ in masks],
        "stability_score": [mask["stability_score"] for mask, _ in masks],
    }.items():
        assert found[name]["mean"] == pytest.approx(np.mean(values))
        assert [found[name][key] for key in ("min", "5%", "median", "max")] == pytest.approx(
            np.quantile(values, [0, 0.05, 0.5, 1])
        )
    assert found["long side"]["max"] == max(
        max(each["image"]["width"], each["image"]["height"]) for each in annotations
    )
    assert json.loads(json.dumps(stats)) == stats


@pytest.mark.slow
def test_long_columns_are_described_from_an_even_stride(index, monkeypatch):
    whole = statistics.describe(index)
    monkeypatch.setattr(statistics, "MAX_ROWS", 7)
    monkeypatch.setattr(statistics, "_IMAGE_BLOCK", 3)
    sampled = statistics.describe(index)
    assert sampled["granularity"] == whole["granularity"]
    assert sampled["sampled_rows"] == {
        "images": 7,
        "masks": len(range(0, whole["masks"], -(-whole["masks"] // 7))),
    }
    area = index.masks["area"][:: -(-whole["masks"] // 7)]
    assert sampled["distributions"]["mask area"]["median"] == np.median(area)
    assert "(distributions from 7 images and" in statistics.table(sampled)
    assert "(distributions from" not in statistics.table(whole)


@pytest.mark.slow
def test_the_table_says_it_in_words(index):
    text = statistics.table(statistics.describe(index))
    assert text.startswith(f"13 images with {index.manifest.masks:,} masks in 4 tars, ")
    assert "images without masks: 1, without json: 1, unusable and left out: 1" in text
    assert "medium (1% to 10%)" in text
    assert all(len(line) <= 110 for line in text.splitlines())
    heads, rows = (
        [line for line in text.splitlines() if "median" in line],
        [line for line in text.splitlines() if line.startswith("predicted_iou")],
    )
    assert len(heads[0]) == len(rows[0])


def test_an_index_without_masks(tmp_path, index):
    payload = next(iter(members(index.shard_paths[0]).values()))
    tar.write(tmp_path / "a.tar", [("sa_1.jpg", payload)])
    stats = statistics.describe(build(tmp_path / "a.tar", tmp_path / "index"))
    assert (stats["masks"], list(stats["granularity"].values())) == (0, [0, 0, 0])
    assert "mask area" not in stats["distributions"]
    assert "predicted_iou" not in statistics.table(stats)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(10**6), 10**9), min_size=1, max_size=50).map(
        lambda held: np.array(held, np.int64)
    )
    | st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50).map(
        lambda held: np.array(held, np.float32)
    )
)
def test_every_number_is_in_one_bar(column):
    found = statistics.histogram(column)
    edges, bars = np.array(found["edges"]), len(found["counts"])
    assert len(edges) == bars + 1 <= statistics.MAX_BINS + 3
    assert sum(found["counts"]) == len(column)
    assert (np.diff(edges) > 0).all()
    slack = 1e-5 * (edges[1] - edges[0]) + 1e-9 * np.abs(column).max()
    assert edges[0] <= column.min() + slack
    assert column.max() <= edges[-1] + slack


def test_bars_count_what_numpy_counts():
    values = np.random.default_rng(0).normal(100, 30, 1000)
    found = statistics.histogram(values)
    assert found["counts"] == np.histogram(values, found["edges"])[0].tolist()
    assert np.allclose(np.diff(found["edges"]), 10)


def test_whole_numbers_have_bars_of_whole_width():
    assert statistics.histogram(np.array([3, 5, 5], np.int32)) == {
        "edges": [3, 4, 5, 6],
        "counts": [1, 0, 2],
    }
    assert statistics.histogram(np.full(7, 1500, np.int32)) == {
        "edges": [1500, 1501],
        "counts": [7],
    }


def test_rounded_scores_stay_in_the_bar_of_their_number():
    scores = np.repeat(np.arange(0, 101, 5), 2).astype(np.float32) / np.float32(100)
    found = statistics.histogram(scores)
    assert found["edges"] == [round(0.05 * i, 12) for i in range(22)]
    assert found["counts"] == [2] * 21


def test_logarithmic_bars_have_equal_ratios():
    shares = 10.0 ** np.random.default_rng(0).uniform(-4, 0, 1000)
    found = statistics.histogram(shares, logarithmic=True)
    edges = np.array(found["edges"])
    assert np.allclose(edges[1:] / edges[:-1], 10 ** (1 / 8))
    assert found["counts"] == np.histogram(shares, edges)[0].tolist()
    assert statistics.histogram(np.array([0.0, 0.0, 1.0]), logarithmic=True)["counts"][0] == 2
    assert (
        len(statistics.histogram(np.array([0.0, 1.0]), logarithmic=True)["counts"])
        == 8 * statistics.MAX_DECADES
    )
    assert statistics.histogram(np.ones(4), logarithmic=True)["counts"] == [4]
    assert sum(statistics.histogram(np.zeros(4), logarithmic=True)["counts"]) == 4


@pytest.mark.parametrize(
    "least, step", [(0.0, 0.01), (0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (6.0, 10.0), (250.0, 500.0)]
)
def test_steps_are_round(least, step):
    assert statistics.round_step(least) == step


def test_numbers_are_short():
    assert [statistics.short(value) for value in (2250.4, 0.12345)] == ["2,250", "0.123"]


def test_statistics_hold_the_histograms(index):
    stats = statistics.describe(index)
    assert stats["histograms"].keys() == stats["distributions"].keys()
    for name, histogram in stats["histograms"].items():
        about_images = name in ("masks per image", "short side", "long side", "jpg bytes")
        assert sum(histogram["counts"]) == stats["images" if about_images else "masks"]
