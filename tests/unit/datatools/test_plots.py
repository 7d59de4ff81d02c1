"""The pictures of `gigamask stats`: what is drawn is read back from the figure that is saved."""

import sys

import numpy as np
import pytest
from PIL import Image

from gigamask.data.index import build
from gigamask.datatools import plots, sampler_stats, stats
from gigamask.samplers.random import Random
from tests.commands import refusal
from tests.errors import error_line
from tests.unit.datatools.test_sampler_stats import SIX, Fixed


@pytest.fixture(scope="module")
def found(scenes, tmp_path_factory):
    return stats.describe(build(scenes, tmp_path_factory.mktemp("index") / "index"))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    figures, save = [], plots._save
    monkeypatch.setattr(
        plots, "_save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    return figures


def panel(figure, name: str):
    (found,) = (each for each in figure.axes if each.get_title(loc="left") == name)
    return found


def texts(figure) -> set[str]:
    """All that is written on a figure, its legends included."""
    from matplotlib.text import Text

    return {each.get_text() for each in figure.findobj(Text)}


@pytest.mark.long
def test_the_picture_shows_the_counts(found, tmp_path, drawn):
    path = tmp_path / "stats.png"
    plots.plot_stats(found, path, "scenes")
    (figure,) = drawn
    with Image.open(path) as picture:
        assert picture.size == (1600, 1300)
        assert len(np.unique(np.array(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 50
    assert [bar.get_height() for bar in panel(figure, "Granularity").patches] == list(
        found["granularity"].values()
    )
    for name, (_, y_label, columns) in plots.HISTOGRAMS.items():
        steps = [each.get_data() for each in panel(figure, name).patches]
        assert [each.values.tolist() for each in steps] == [
            found["histograms"][column]["counts"] for column in columns
        ]
        assert [each.edges.tolist() for each in steps] == [
            found["histograms"][column]["edges"] for column in columns
        ]
        assert panel(figure, name).get_ylabel() == y_label
        assert all(
            tick == int(tick) for tick in panel(figure, name).get_yticks()
        )  # they are counts
    assert panel(figure, "Mask area").get_xscale() == "log"
    middle = found["distributions"]["long side"]
    said = texts(figure)
    assert f"long side: median {middle['median']:,.0f}, mean {middle['mean']:,.0f}" in said
    assert f"scenes\n{found['images']:,} images, {found['masks']:,} masks, 1 tar" in said


@pytest.mark.slow
def test_equal_values_are_said_and_not_drawn(found, tmp_path, drawn):
    columns = ("predicted_iou", "short side", "long side")
    equal = {name: found["distributions"][name] | {"min": 1, "max": 1} for name in columns}
    told = found | {"distributions": found["distributions"] | equal}
    plots.plot_stats(told, tmp_path / "ones.png", "ones")
    assert not panel(drawn[0], "Predicted IoU").patches
    assert not panel(drawn[0], "Image size").patches
    assert panel(drawn[0], "Masks per image").patches
    assert {"predicted_iou: always 1", "short side: always 1\nlong side: always 1"} <= texts(
        drawn[0]
    )


@pytest.mark.slow
def test_sampled_rows_and_missing_columns_are_said(found, tmp_path, drawn):
    few = {"images": 3, "masks": 2}
    plots.plot_stats(
        found | {"sampled_rows": few, "histograms": {}}, tmp_path / "stats.png", "$x^2$" + "x" * 200
    )
    assert sum(text.get_text() == "none" for each in drawn[0].axes for text in each.texts) == 5
    assert any(
        "; bars count 3 images and 2 masks at an even stride" in text for text in texts(drawn[0])
    )


@pytest.mark.slow
def test_sampler_plot_shows_the_fractions(tmp_path, drawn):
    """Fine and coarse swap places half way; no medium item is visited."""
    described = sampler_stats.describe(SIX, Fixed((0, 3, 2, 5)), 2, 4)
    plots.plot_sampler_stats(described, tmp_path / "sampler.png", "fixed over six")
    (figure,) = drawn
    curves = {each.get_label(): each.get_data() for each in panel(figure, "Granularity").patches}
    assert {name: curve.values.tolist() for name, curve in curves.items()} == {
        "fine": [100, 0, 100, 0],
        "medium": [0, 0, 0, 0],
        "coarse": [0, 100, 0, 100],
    }
    assert curves["fine"].edges.tolist() == [0, 2, 4, 6, 8]
    assert [each.get_height() for each in panel(figure, "Visits").patches] == [2, 0, 4]
    band, median = (each.get_data() for each in panel(figure, "Difficulty").patches)
    assert (band.baseline <= median.values).all()
    assert (median.values <= band.values).all()
    said = texts(figure)
    legends = "fine,medium,coarse,in the data,10 to 90 %,median,visited so far,all,never"
    axes = "samples drawn,% of the samples,difficulty, 0 to 1,tars,items,in a step of the curve"
    assert {*legends.split(","), *axes.split(",")} - {"difficulty", " 0 to 1"} <= said
    assert any(
        "2 epochs of 4 samples from 6 items; each step of a curve is 2 samples; vertical lines "
        "end epochs" in text
        for text in said
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, why",
    [
        ("missing/stats.png", "No such file or directory"),
        ("stats.xyz", "Format 'xyz' is not supported"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(found, tmp_path, name, why):
    with error_line(rf"^--picture .*{name}: cannot be written \({why}.*\)"):
        plots.plot_stats(found, tmp_path / name, "scenes")
    with error_line(rf"^--picture .*{name}: cannot be written"):
        plots.plot_sampler_stats(sampler_stats.describe(SIX, Random()), tmp_path / name, "six")


@pytest.mark.parametrize("suffix", ["png", "jpg", "svg"])
def test_a_plot_is_drawn_again_but_replaces_no_photograph(tmp_path, suffix):
    from matplotlib.figure import Figure

    plots.check_picture(plot := f"{tmp_path}/plot.{suffix}")
    plots._save(Figure(), plot)
    plots.check_picture(plot)
    Image.new("RGB", (8, 8)).save(photo := f"{tmp_path}/photo.png")
    with error_line("--picture .*photo.png: would be replaced, but no plot is in it"):
        plots.check_picture(photo)


@pytest.mark.parametrize("words", ["", "--sampler random"])
def test_without_matplotlib_the_error_says_what_to_install(
    words, scenes, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    line = refusal(capsys, f"stats {scenes}", words, f"--picture {tmp_path}/stats.png")
    assert "pip install 'gigamask[plots]'" in line
    assert not (tmp_path / "stats.png").exists()
