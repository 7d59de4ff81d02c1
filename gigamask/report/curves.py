"""Curves over steps as inline SVG: light and dark, readable on a phone, with values that show where the pointer is.

Enters: columns of numbers, None where there is none. Leaves: HTML. A column of many records is drawn as the range of each piece, faint, below its
moving mean. The axis spans the mean and all but the outermost 2 % of what is recorded on either side; what lies beyond is cut off.

Not here: which curves a page has (`report.page`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from gigamask.report.html import COLOURS, Markup, figure

WIDTH, HEIGHT = 380, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 6, 20
"""Room for the ticks, in the picture's own units."""
POINTS = 160
"""Of a curve, however many records there are."""
PLACES = 48
"""Where the pointer is told values."""
WINDOW_SHARE = 0.05
"""Of all records, over which the moving mean goes."""
LEAST_SMOOTHED = 30
"""Records below which nothing is smoothed."""


@dataclass(frozen=True)
class Series:
    """One curve: its name, steps and values, which colour it has, whether its points are few and drawn as such, and whether
    it is drawn `exact`, as recorded, however many records there are."""

    name: str
    steps: Sequence[float | int]
    values: Sequence[float | int | None]
    colour: int = 0
    dotted: bool = False
    exact: bool = False

    @cached_property
    def known(self) -> tuple[np.ndarray, np.ndarray]:
        """The steps and values that there are."""
        values = np.array(self.values, np.float64)  # None becomes NaN
        there = ~np.isnan(values)
        return np.array(self.steps, np.float64)[there], values[there]

    @property
    def window(self) -> int:
        """How many records the moving mean goes over, 1 where nothing is smoothed."""
        count = len(self.known[0])
        return 1 if self.dotted or self.exact or count < LEAST_SMOOTHED else 2 * round(WINDOW_SHARE * count / 2) + 1

    @cached_property
    def smooth(self) -> np.ndarray:
        """The mean of the records around each one, at the ends of those that there are."""
        _, values = self.known
        places, half = np.arange(len(values)), self.window // 2
        first, behind = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
        sums = np.concatenate([[0.0], np.cumsum(values)])
        return (sums[behind] - sums[first]) / (behind - first)

    @property
    def last(self) -> float:
        """The mean of the last records, as many as are smoothed over."""
        return float(self.known[1][-self.window :].mean())


@dataclass(frozen=True)
class Axes:
    """Where steps and values lie in the picture."""

    last: float
    low: float
    high: float

    @classmethod
    def around(cls, series: Sequence[Series]) -> "Axes":
        """Returns the axes that hold some curves."""
        ends: list[float] = []
        for each in series:
            values, smooth = each.known[1], each.smooth
            ends += [*np.quantile(values, [0.02, 0.98] if each.window > 1 else [0, 1]), smooth.min(), smooth.max()]
        low, high = min(ends), max(ends)
        room = 0.04 * (high - low) or 0.1 * abs(high) or 1.0
        floor = 0.0 if low >= 0 else -math.inf
        return cls(max(float(each.known[0][-1]) for each in series) or 1.0, max(low - room, floor), high + room)

    def x(self, steps: Any) -> Any:
        """Returns where a step lies, or an array of them."""
        return LEFT + (WIDTH - LEFT - RIGHT) * steps / self.last

    def y(self, values: Any) -> Any:
        """Returns where a value lies, or an array of them."""
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - values) / (self.high - self.low)


def chart(title: str, unit: str, series: Sequence[Series], marks: Sequence[tuple[int, str]] = (), named: bool = True) -> Markup:
    """Returns one picture of some curves, nothing where none has a value; `marks` are steps at which something happened.

    Several are `named` below the title, unless the page does so once for all of its charts.
    """
    series = [each for each in series if len(each.known[0])]
    if not series:
        return Markup("")
    axes = Axes.around(series)
    parts = [*_grid(axes), *(_mark(axes, step, what) for step, what in marks if 0 < step <= axes.last)]
    for each in series:
        parts += _curve(axes, each, alone=len(series) == 1)
    parts += _places(axes, series)
    last = f" {figure(series[0].last)}" if named and len(series) == 1 else ""
    names = legend(series) if named and len(series) > 1 else ""
    head = f"<figcaption><b>{escape(title)}</b>{last}{escape(f' {unit}' if unit else '')}{names}</figcaption>"
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return Markup(f"<figure>{head}{body}</figure>")


def legend(series: Iterable[Series]) -> Markup:
    """Returns the names of some curves beside their colours."""
    names = "".join(
        f'<span><i class="b{each.colour % COLOURS}{" dash" * (each.colour >= COLOURS)}"></i>{escape(each.name)}</span>' for each in series
    )
    return Markup(f'<div class="legend">{names}</div>')


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Returns round numbers between two, at most so many steps apart."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(each for each in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * each) <= most)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(axes: Axes) -> Iterator[str]:
    for value in ticks(axes.low, axes.high):
        y = axes.y(value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>'
        yield f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>'
    for step in ticks(0.0, axes.last):
        yield f'<text x="{axes.x(step):.1f}" y="{HEIGHT - 4}" text-anchor="{"middle" if axes.x(step) < WIDTH - 30 else "end"}">{_short(step)}</text>'


def _short(value: float) -> str:
    """Returns a tick's number."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.6g}"


def _mark(axes: Axes, step: int, what: str) -> str:
    x = axes.x(step)
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--warn)" stroke-dasharray="2 4">'
    return f"{line}<title>{escape(what)}</title></line>"


def _curve(axes: Axes, series: Series, alone: bool) -> Iterator[str]:
    """Yields a curve; what is recorded lies below its mean where it is the only one."""
    steps, values = series.known
    stroke = f'class="k{series.colour % COLOURS}" fill="none"'
    dash = ' stroke-dasharray="5 3"' if series.colour >= COLOURS else ""
    if series.window > 1 and alone:
        yield f'<path d="{_ranges(axes, steps, values)}" {stroke} stroke-width="1" opacity=".35"/>'
    kept = np.unique(np.linspace(0, len(steps) - 1, min(POINTS, len(steps))).round().astype(int))
    x, y = axes.x(steps[kept]), axes.y(series.smooth[kept])
    yield f'<path d="M{_points(x, y)}" {stroke} stroke-width="1.8" stroke-linejoin="round"{dash}/>'
    if series.dotted or len(kept) == 1:
        yield "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4" class="f{series.colour % COLOURS}"/>' for a, b in zip(x, y, strict=True))


def _ranges(axes: Axes, steps: np.ndarray, values: np.ndarray) -> str:
    """Returns the least and the largest value of each piece of the records, as one line within the axes."""
    x, y = axes.x(steps), np.clip(axes.y(values), TOP, HEIGHT - BOTTOM)
    if len(x) > 2 * POINTS:
        pieces = np.array_split(np.arange(len(x)), POINTS)
        x = np.repeat([x[piece].mean() for piece in pieces], 2)
        y = np.array([end for piece in pieces for end in (y[piece].min(), y[piece].max())])
    return f"M{_points(x, y)}"


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _places(axes: Axes, series: Sequence[Series]) -> Iterator[str]:
    """Yields bands that tell, when the pointer is there, which step it is and what each curve is at."""
    every = np.unique(np.concatenate([each.known[0] for each in series]))
    at = every[np.unique(np.linspace(0, len(every) - 1, min(PLACES, len(every))).round().astype(int))]
    edges = axes.x(np.concatenate([at[:1], (at[1:] + at[:-1]) / 2, at[-1:]]))
    edges[0], edges[-1] = min(edges[0], axes.x(at[0]) - 4), max(edges[-1], axes.x(at[-1]) + 4)
    smooth = [(each, each.known[0], each.smooth) for each in series]
    for step, left, right in zip(at, edges[:-1], edges[1:], strict=True):
        x, told, dots = axes.x(step), [f"step {step:,.0f}"], []
        for each, steps, values in smooth:
            if steps[0] <= step <= steps[-1]:
                value = float(np.interp(step, steps, values))
                told.append(f"{each.name}: {figure(value)}")
                dots.append(f'<circle cx="{x:.1f}" cy="{axes.y(value):.1f}" r="3.2" class="f{each.colour % COLOURS}"/>')
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="var(--faint)"/>'
        band = f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - BOTTOM}" fill="transparent"/>'
        yield f'<g class="at">{band}{line}{"".join(dots)}<title>{escape(chr(10).join(told))}</title></g>'
