"""Plots of the results of `gigamask stats`, drawn to files with matplotlib (extra `plots`).

matplotlib is imported on first use. Figures are made without pyplot, so there is no global state.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gigamask.datatools.sampler_stats import epochs_text
from gigamask.datatools.stats import short
from gigamask.errors import GigamaskError, counted
from gigamask.interfaces import GRANULARITIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any color vision (Okabe and Ito).
BLUE, ORANGE, GREEN = "#0072b2", "#e69f00", "#009e73"
DASHED = {"linestyle": (0, (5, 4)), "linewidth": 1}
ABOVE: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1, 1),
    "ncols": 4,
    "frameon": False,
}
"""Position of the legend on the line of the title, where it covers nothing."""
MARK = "Matplotlib"
"""What files that it wrote hold, but for JPEGs, which get it as a comment."""
MAX_EPOCH_LINES = 20
SIZE_INCHES, DPI = (16.0, 4.0), 100
"""Size of one row of panels."""
HISTOGRAMS = {
    "Masks per image": ("masks of an image", "images", ("masks per image",)),
    "Mask area": ("share of the image", "masks", ("mask area share",)),
    "Image size": ("pixels", "images", ("short side", "long side")),
    "Predicted IoU": ("predicted_iou", "masks", ("predicted_iou",)),
    "Stability": ("stability_score", "masks", ("stability_score",)),
}
"""Labels of the axes of each panel, and the columns drawn over each other."""


def require_matplotlib() -> None:
    """Raise `GigamaskError` unless matplotlib is installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise GigamaskError(
            "--picture needs matplotlib, which is not installed; run pip install 'gigamask[plots]'"
        ) from None


def check_picture(path: str) -> None:
    """Check, before any work is done, that a plot can be drawn to a file.

    Args:
        path: The file.

    Raises:
        GigamaskError: Matplotlib is not installed, or the file holds something else than a plot.
    """
    require_matplotlib()
    with suppress(OSError), open(path, "rb") as file:
        if MARK.encode() not in file.read():
            raise GigamaskError(
                f"--picture {path}: would be replaced, but no plot is in it; give another file"
            )


def plot_stats(stats: dict[str, Any], path: str | Path, title: str) -> None:
    """Draw the statistics of an index.

    Args:
        stats: Result of `stats.describe`.
        path: The file to write; its suffix selects the format.
        title: Heading of the picture.

    Raises:
        GigamaskError: Matplotlib is not installed, or the file cannot be written.
    """
    rows = stats["sampled_rows"]
    subtitle = ", ".join(counted(stats[f"{noun}s"], noun) for noun in ("image", "mask", "tar"))
    if rows["images"] < stats["images"] or rows["masks"] < stats["masks"]:
        subtitle += (
            f"; bars count {rows['images']:,} images and {rows['masks']:,} masks at an even stride"
        )
    figure, (granularity, *panels) = _figure(3, title, subtitle)
    _bars(granularity, "Granularity", stats["granularity"], stats["masks"], "masks")
    for panel, (name, (x_label, y_label, columns)) in zip(panels, HISTOGRAMS.items(), strict=True):
        panel.set_title(name, loc="left", fontweight="bold")
        panel.set(xlabel=x_label, ylabel=y_label)
        _histograms(panel, stats, [column for column in columns if column in stats["histograms"]])
    _save(figure, path)


def plot_sampler_stats(stats: dict[str, Any], path: str | Path, title: str) -> None:
    """Draw what a sampler visits over its epochs.

    Args:
        stats: Result of `sampler_stats.describe`.
        path: The file to write; its suffix selects the format.
        title: Heading of the picture.

    Raises:
        GigamaskError: Matplotlib is not installed, or the file cannot be written.
    """
    pieces, data, visits = stats["pieces"], stats["data"], stats["visits"]
    subtitle = (
        f"{epochs_text(stats)} of {stats['positions']:,} samples from {stats['items']:,} items;"
        f" each step of a curve is {pieces[0]['end']:,} samples"
    )
    epoch_lines = range(1, stats["epochs"]) if stats["epochs"] <= MAX_EPOCH_LINES else ()
    if epoch_lines:
        subtitle += "; vertical lines end epochs"
    figure, (granularity, difficulty, tars, counts) = _figure(2, title, subtitle)
    edges = [0, *(piece["end"] for piece in pieces)]
    for panel, name, y_label in (
        (granularity, "Granularity", "% of the samples"),
        (difficulty, "Difficulty", "difficulty, 0 to 1"),
        (tars, "Tars", "tars"),
    ):
        panel.set_title(name, loc="left", fontweight="bold")
        panel.set(xlabel="samples drawn", ylabel=y_label, xlim=(0, edges[-1]))
        for epoch in epoch_lines:
            panel.axvline(epoch * stats["positions"], color="0.8", zorder=0)
    for name, color in zip(GRANULARITIES, (BLUE, ORANGE, GREEN), strict=True):
        shares = [100 * piece["granularity"][name] for piece in pieces]
        granularity.stairs(shares, edges, baseline=None, color=color, linewidth=2, label=name)
        granularity.axhline(100 * data["granularity"][name], color=color, **DASHED)
    spread = {name: [piece["difficulty"][name] for piece in pieces] for name in data["difficulty"]}
    band = {"baseline": spread["10%"], "fill": True, "color": BLUE, "alpha": 0.2}
    difficulty.stairs(spread["90%"], edges, label="10 to 90 %", **band)
    difficulty.stairs(
        spread["median"], edges, baseline=None, color=BLUE, linewidth=2, label="median"
    )
    for level in data["difficulty"].values():
        difficulty.axhline(level, color=BLUE, **DASHED)
    for key, color, label in (
        ("tars_here", ORANGE, "in a step of the curve"),
        ("tars_seen", BLUE, "visited so far"),
    ):
        values = [piece[key] for piece in pieces]
        tars.stairs(values, edges, baseline=None, color=color, linewidth=2, label=label)
    tars.axhline(data["tars"], color="black", **DASHED)
    for panel, dashed in ((granularity, "in the data"), (difficulty, "in the data"), (tars, "all")):
        panel.plot([], [], color="black", label=dashed, **DASHED)
        panel.set_ylim(bottom=0)
        panel.legend(**ABOVE)
    shown = {name: visits[name] for name in ("never", "once", "more")}
    _bars(counts, "Visits", shown, stats["items"], "items")
    most = f"{visits['most']:,}"
    counts.set_xlabel(f"visits in {epochs_text(stats)}; the most visited item has {most}")
    _save(figure, path)


def _figure(rows: int, title: str, subtitle: str) -> "tuple[Figure, list[Axes]]":
    """Return an empty figure with two columns of panels."""
    require_matplotlib()
    from matplotlib.figure import Figure

    width, height = SIZE_INCHES
    figure = Figure(figsize=(width, rows * height + 1), dpi=DPI, layout="constrained")
    if len(title) > 110:
        title = "..." + title[-107:]
    # A dollar sign would start a formula.
    figure.suptitle(f"{title}\n{subtitle}".replace("$", r"\$"), fontsize=16)
    panels = figure.subplots(rows, 2).ravel().tolist()
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.9")
        panel.set_axisbelow(True)
    return figure, panels


def _histograms(panel: "Axes", stats: dict[str, Any], names: list[str]) -> None:
    """Draw columns of an index over each other, with their medians and means."""
    spread = [stats["distributions"][name] for name in names]
    if all(each["min"] == each["max"] for each in spread):
        said = [
            f"{name}: always {short(each['min'])}" for name, each in zip(names, spread, strict=True)
        ]
        text = "\n".join(said) or "none"
        panel.text(0.5, 0.5, text, ha="center", transform=panel.transAxes, color="0.5")
        panel.set(xticks=[], yticks=[])
        return
    logarithmic = names == ["mask area share"]
    for name, color in zip(names, (BLUE, ORANGE), strict=False):
        middle = stats["distributions"][name]
        scale, unit = (100, " %") if logarithmic else (1, "")
        median, mean = (f"{short(scale * middle[key])}{unit}" for key in ("median", "mean"))
        histogram = stats["histograms"][name]
        panel.stairs(
            histogram["counts"],
            histogram["edges"],
            fill=True,
            color=color,
            alpha=0.6 if len(names) > 1 else 0.85,
            label=f"{name}: median {median}, mean {mean}",
        )
    if len(names) > 1:
        panel.legend(**ABOVE)
    else:
        panel.set_title(f"median {median}, mean {mean}", loc="right", fontsize="medium")
    edges = [stats["histograms"][name]["edges"] for name in names]
    low, high = min(bins[0] for bins in edges), max(bins[-1] for bins in edges)
    if logarithmic:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

        low = min(low, high / 10)
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))
        panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlim(low, high)
    panel.locator_params(axis="y", integer=True)
    panel.set_ylim(bottom=0)


def _bars(panel: "Axes", name: str, counts: dict[str, int], total: int, y_label: str) -> None:
    """Draw one bar per name, labelled with its share of the total."""
    panel.set_title(name, loc="left", fontweight="bold")
    panel.set_ylabel(y_label)
    bars = panel.bar(list(counts), list(counts.values()), color=BLUE, width=0.6)
    panel.bar_label(bars, [f"{count / max(total, 1):.1%}" for count in counts.values()])
    panel.margins(y=0.12)


def _save(figure: "Figure", path: str | Path) -> None:
    """Write a figure in the format that the file's suffix selects."""
    try:
        is_jpeg = str(path).lower().endswith((".jpg", ".jpeg"))
        options: dict[str, Any] = {"pil_kwargs": {"comment": MARK}} if is_jpeg else {}
        figure.savefig(path, **options)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise GigamaskError(
            f"--picture {path}: cannot be written ({why}); name a .png file in a folder that exists"
        ) from None
