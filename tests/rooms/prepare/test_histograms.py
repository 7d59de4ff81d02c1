"""Histograms against numpy's, and the picture looked at pixel by pixel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gigamask.data.index import build
from gigamask.faults import Fault
from gigamask.prepare import histograms, statistics


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(10**6), 10**9), min_size=1, max_size=50).map(lambda held: np.array(held, np.int64))
    | st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50).map(lambda held: np.array(held, np.float32))
)
def test_every_number_is_in_one_bar(column):
    found = histograms.count(column)
    edges, bars = np.array(found["edges"]), len(found["counts"])
    assert len(edges) == bars + 1 <= histograms.MOST_BARS + 3
    assert sum(found["counts"]) == len(column)
    assert (np.diff(edges) > 0).all()
    slack = 1e-5 * (edges[1] - edges[0]) + 1e-9 * np.abs(column).max()
    assert edges[0] <= column.min() + slack
    assert column.max() <= edges[-1] + slack


def test_bars_count_what_numpy_counts():
    values = np.random.default_rng(0).normal(100, 30, 1000)
    found = histograms.count(values)
    assert found["counts"] == np.histogram(values, found["edges"])[0].tolist()
    assert np.allclose(np.diff(found["edges"]), 10)


def test_whole_numbers_have_bars_of_whole_width():
    assert histograms.count(np.array([3, 5, 5], np.int32)) == {"edges": [3, 4, 5, 6], "counts": [1, 0, 2]}
    assert histograms.count(np.full(7, 1500, np.int32)) == {"edges": [1500, 1501], "counts": [7]}


def test_rounded_scores_stay_in_the_bar_of_their_number():
    scores = np.repeat(np.arange(0, 101, 5), 2).astype(np.float32) / np.float32(100)
    found = histograms.count(scores)
    assert found["edges"] == [round(0.05 * i, 12) for i in range(22)]
    assert found["counts"] == [2] * 21


def test_logarithmic_bars_have_equal_ratios():
    shares = 10.0 ** np.random.default_rng(0).uniform(-4, 0, 1000)
    found = histograms.count(shares, logarithmic=True)
    edges = np.array(found["edges"])
    assert np.allclose(edges[1:] / edges[:-1], 10 ** (1 / 8))
    assert found["counts"] == np.histogram(shares, edges)[0].tolist()
    assert histograms.count(np.array([0.0, 0.0, 1.0]), logarithmic=True)["counts"][0] == 2
    assert len(histograms.count(np.array([0.0, 1.0]), logarithmic=True)["counts"]) == 8 * histograms.DECADES
    assert histograms.count(np.ones(4), logarithmic=True)["counts"] == [4]
    assert sum(histograms.count(np.zeros(4), logarithmic=True)["counts"]) == 4


@pytest.mark.parametrize(("least", "step"), [(0.0, 0.01), (0.3, 0.5), (1.0, 1.0), (1.1, 2.0), (6.0, 10.0), (250.0, 500.0)])
def test_steps_are_round(least, step):
    assert histograms.round_step(least) == step


def test_numbers_are_short():
    assert [histograms.thousands(value) for value in (0.0, 800.0, 1500.0, 2e7, 1.1e9)] == ["0", "800", "1.5k", "20M", "1.1G"]
    assert [histograms.percent(share) for share in (1.0, 0.0567, 0.00000123)] == ["100%", "5.7%", "0.00012%"]
    assert [histograms.short(value) for value in (2250.4, 0.12345)] == ["2,250", "0.123"]
    assert [text for _, text in histograms.steps(0.88, 1.0)] == ["0.88", "0.90", "0.92", "0.94", "0.96", "0.98", "1.00"]
    assert [text for _, text in histograms.decades(-3.2, 0.0)] == ["0.1%", "1%", "10%", "100%"]


def test_a_long_title_loses_its_beginning():
    assert histograms.shorten("short", 30, 800) == "short"
    cut = histograms.shorten("a" * 300 + "/index", 30, 300)
    assert cut.startswith("...a")
    assert cut.endswith("/index")
    assert histograms.font(30).getlength(cut) <= 300


@pytest.fixture(scope="module")
def stats(scenes, tmp_path_factory):
    return statistics.describe(build(scenes, tmp_path_factory.mktemp("index") / "index"))


def test_statistics_hold_the_histograms(stats):
    assert stats["histograms"].keys() == stats["distributions"].keys()
    for name, histogram in stats["histograms"].items():
        about_images = name in ("masks per image", "short side", "long side", "jpg bytes")
        assert sum(histogram["counts"]) == stats["images" if about_images else "masks"]


def bars(picture: np.ndarray, colour: tuple[int, int, int]) -> tuple[int, int]:
    """Returns how many pixels of that colour there are, and the height of the tallest column of them."""
    here = (picture == colour).all(2)
    return int(here.sum()), int(here.sum(0).max())


def test_the_picture_shows_the_counts(stats, tmp_path):
    path = tmp_path / "stats.png"
    histograms.write_picture(stats, path, "scenes")
    picture = np.array(Image.open(path))
    assert picture.shape[1] == 1600
    high, wide = histograms.PANEL_HEIGHT, (histograms.WIDTH - 2 * histograms.MARGIN) // 2
    for number, (name, _, _, _) in enumerate(histograms.PANELS):
        x, y = histograms.MARGIN + wide * (number % 2), histograms.HEAD + high * (number // 2)
        drawn, tallest = map(max, *(bars(picture[y : y + high, x : x + wide], colour) for colour in histograms.COLOURS))
        box = high - histograms.TOP - histograms.BOTTOM
        assert drawn > 500, name
        assert 0.9 * box < tallest <= box + 1, name
    granularity = picture[histograms.HEAD + high : histograms.HEAD + 2 * high, histograms.MARGIN : histograms.MARGIN + wide]
    columns = (granularity == histograms.COLOURS[0]).all(2).sum(0)
    third = len(columns[histograms.LEFT : -histograms.RIGHT]) // 3
    heights = [columns[histograms.LEFT + i * third + third // 2] for i in range(3)]
    counts = list(stats["granularity"].values())
    assert np.allclose(np.array(heights) / max(heights), np.array(counts) / max(counts), atol=0.02)


def test_equal_values_leave_room_on_their_axis(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(histograms.ImageDraw.ImageDraw, "text", lambda self, at, text, *_, **__: told.append(text))
    ones = {
        "histograms": {"predicted_iou": histograms.count(np.ones(9, np.float32))},
        "distributions": {"predicted_iou": {"median": 1.0, "mean": 1.0}},
    }
    rows = {"images": 1, "masks": 9}
    histograms.write_picture(rows | ones | {"tars": 1, "sampled_rows": rows, "granularity": {"fine": 9}}, tmp_path / "ones.png", "ones")
    assert [text for text in told if text.startswith(("0.9", "1.0"))] == ["0.92", "0.94", "0.96", "0.98", "1.00"]
    blue = (np.array(Image.open(tmp_path / "ones.png"))[histograms.HEAD + 2 * histograms.PANEL_HEIGHT :] == histograms.COLOURS[0]).all(2).any(0)
    inside = (histograms.WIDTH - 2 * histograms.MARGIN) // 2 - histograms.LEFT - histograms.RIGHT
    assert 0.08 < blue.sum() / inside < 0.12


def test_thinned_columns_and_none_are_said(stats, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(histograms.ImageDraw.ImageDraw, "text", lambda self, at, text, *_, **__: told.append(text))
    few = {"images": 3, "masks": 2}
    histograms.write_picture(stats | {"sampled_rows": few, "histograms": {}}, tmp_path / "stats.png", "scenes")
    assert any("; bars count 3 images and 2 masks at an even stride" in text for text in told)
    assert told.count("none") == 5
    told.clear()
    histograms.write_picture(stats, tmp_path / "stats.png", "scenes")
    assert not any("stride" in text for text in told)
    assert {"Masks per image", "share of the image, logarithmic", "predicted_iou", "images", "masks", "pixels"} <= set(told)


@pytest.mark.parametrize(("name", "why"), [("missing/stats.png", "No such file or directory"), ("stats.xyz", "unknown file extension: .xyz")])
def test_a_file_that_cannot_be_written_is_named(stats, tmp_path, name, why):
    with pytest.raises(Fault, match=rf"^--picture .*{name}: cannot be written \({why}\); name a .png file in a folder that exists$"):
        histograms.write_picture(stats, tmp_path / name, "scenes")
