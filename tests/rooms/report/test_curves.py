"""Curves: where they lie, what is smoothed, what the pointer is told."""

import re

import numpy as np
import pytest

from gigamask.report.curves import HEIGHT, LEFT, RIGHT, WIDTH, Axes, Series, chart, ticks
from tests.html import Page


def test_few_records_are_drawn_as_they_are():
    few = Series("loss", [1, 2, 3], [3.0, None, 1.0])
    assert few.window == 1
    assert few.smooth.tolist() == [3.0, 1.0]
    assert few.last == 1.0


def test_many_are_smoothed_by_the_mean_of_those_around():
    values = np.random.default_rng(0).random(200)
    many = Series("loss", range(200), values.tolist())
    assert many.window == 11
    assert many.smooth[100] == pytest.approx(values[95:106].mean())
    assert many.smooth[0] == pytest.approx(values[:6].mean())
    assert many.smooth[-1] == pytest.approx(values[-6:].mean())
    assert many.last == pytest.approx(values[-11:].mean())
    assert Series("rate", range(200), values.tolist(), exact=True).window == 1


def test_a_single_spike_does_not_flatten_the_curve():
    values = [1.0] * 100
    values[40] = 1000.0
    assert Axes.around([Series("", range(100), values)]).high < 300


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.93, 0.94), (-3.0, 4000.0), (1e-7, 2e-6), (5.0, 5.1)])
def test_ticks_are_few_round_and_between(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 5
    assert all(low - 1e-12 <= each <= high + 1e-12 for each in found)


def test_a_chart_tells_what_it_shows():
    text = chart(
        "Loss", "", [Series("one <run>", [10, 20], [1.0, 0.5]), Series("two", [10, 30], [2.0, 0.25], 1)], [(15, "went on at step 15"), (99, "x")]
    )
    page = Page(text)
    titles = [page.text[place] for place in range(len(page.text)) if page.text[place].startswith(("step", "went"))]
    assert "went on at step 15" in titles
    assert "x" not in page.text
    assert [each for each in titles if each.startswith("step 10")] == ["step 10\none <run>: 1.000\ntwo: 2.000"]
    assert [each for each in titles if each.startswith("step 30")] == ["step 30\ntwo: 0.250"]
    assert page.count("path") == 2
    lines = [told["d"] for tag, told in page.tags if tag == "path"]
    ends = [float(number) for line in lines for number in re.findall(r"[\d.]+", line)]
    assert all(0 <= each <= max(WIDTH, HEIGHT) for each in ends)
    assert lines[1].endswith(f"L{WIDTH - RIGHT:.1f} {lines[1].rsplit(' ', 1)[1]}"), "the last step lies at the right"
    assert float(lines[0][1:].split(" ")[0]) > LEFT


def test_a_long_curve_takes_little_room():
    values = np.random.default_rng(0).random(100_000).tolist()
    text = chart("Loss", "", [Series("run", range(100_000), values)])
    assert Page(text).count("path") == 2
    assert len(text) < 40_000


def test_where_nothing_is_recorded_there_is_no_chart():
    assert chart("Loss", "", [Series("run", [1, 2], [None, None])]) == ""


@pytest.mark.parametrize("values", [[0.0], [0.0, 0.0], [-1.0, -1.0], [1e-9, 2e-9], [1e12, 3.0]])
def test_any_values_can_be_drawn(values):
    assert Page(chart("x", "", [Series("run", range(len(values)), values)])).count("svg") == 1


def test_more_curves_than_colours_are_dashed():
    series = [Series(f"run {number}", [1, 2], [1.0, 2.0], number) for number in range(10)]
    page = Page(chart("Loss", "", series))
    dashed = [told["class"] for tag, told in page.tags if tag == "path" and "stroke-dasharray" in told]
    assert dashed == ["k0", "k1"]
    assert [told["class"] for tag, told in page.tags if tag == "i"][-2:] == ["b0 dash", "b1 dash"]
