"""Exposure: what a sampler does to granularity, difficulty and tars over its epochs. Items and a sampler enter, plain numbers leave, and a picture.

The sequence of items is cut into pieces of equal length, and each is described beside the data as they are. A sampler that learns from losses is
asked as at the start of training, when none is known.

Not here: the orders (`samplers`), statistics of the data alone (`prepare.statistics`).
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, Int64
from PIL import Image, ImageDraw

from gigamask.faults import Fault
from gigamask.prepare.histograms import FAINT, HEAD, INK, MARGIN, PANEL_HEIGHT, PAPER, WIDTH, Panel, font, save, shorten, steps, thousands
from gigamask.seams import GRANULARITIES, Items, Ledger, Sampler

QUANTILES = {"10%": 0.1, "median": 0.5, "90%": 0.9}
# Chosen to be told apart by people with any colour vision (Okabe and Ito).
BLUE, ORANGE, GREEN = (0, 114, 178), (230, 159, 0), (0, 158, 115)
BAND = (214, 230, 242)
DASH, LINES = 9, 20
"""Pixels of a dash; epochs of which each has a line at its end."""


def describe(items: Items, sampler: Sampler, epochs: int = 1, pieces: int = 50) -> dict[str, Any]:
    """Returns what so many epochs visit, in `pieces` pieces and overall, beside what the data hold, ready for JSON.

    Raises Fault where there is nothing to visit.
    """
    if epochs < 1:
        raise Fault(f"--epochs is {epochs}, it must be at least 1")
    if not items.count:
        raise Fault("there are no items to sample: no image has a mask that passes; give tars with masks")
    granularity, difficulty, tar = items.columns["granularity"], items.columns["difficulty"], items.columns["tar"]
    all_tars = _distinct(tar, int(tar.max()) + 1)
    seconds: list[float] = []
    visits, met = np.zeros(items.count, np.int64), np.zeros(len(all_tars), bool)
    found: list[dict[str, Any]] = []
    position = 0
    for visited in _pieces(items, sampler, epochs, pieces, seconds):
        np.add.at(visits, visited, 1)
        position += len(visited)
        here = _distinct(tar[visited], len(all_tars))
        met |= here
        shares = {"granularity": _shares(granularity[visited]), "difficulty": _quantiles(difficulty[visited])}
        found.append({"end": position, **shares, "tars_seen": int(met.sum()), "tars_here": int(here.sum())})
    return {
        "items": items.count,
        "epochs": epochs,
        "positions": position // epochs,
        "order_seconds": max(seconds),
        "visits": {"never": int((visits == 0).sum()), "once": int((visits == 1).sum()), "more": int((visits > 1).sum()), "most": int(visits.max())},
        "data": {"granularity": _shares(granularity), "difficulty": _quantiles(difficulty), "tars": int(all_tars.sum())},
        "pieces": found,
    }


def _pieces(items: Items, sampler: Sampler, epochs: int, pieces: int, seconds: list[float]) -> Iterator[Int64[np.ndarray, "n"]]:
    """Yields the items of each piece of the sequence, one epoch's order at a time; notes in `seconds` how long each order took to make."""
    ledger = Ledger.empty(items.count) if sampler.decay is not None else None
    began: list[np.ndarray] = []
    edges: list[int] = []
    length = 0
    for epoch in range(epochs):
        began_s = time.perf_counter()
        order = sampler.order(items, epoch, ledger)
        if not epoch:
            length = len(order)
            if not length:
                raise Fault("the sampler's order has no positions; loosen the sampler")
            edges = np.linspace(0, length * epochs, min(pieces, length * epochs) + 1).round().astype(int).tolist()[1:]
        # An order that is worked out where it is looked at takes its time here.
        sequence = np.asarray(order[np.arange(length)], np.int64)
        seconds.append(time.perf_counter() - began_s)
        at = 0
        while edges and edges[0] <= (epoch + 1) * length:
            stop = edges.pop(0) - epoch * length
            yield np.concatenate([*began, sequence[at:stop]])
            began, at = [], stop
        began.append(sequence[at:])


def _distinct(numbers: Int[np.ndarray, "n"], count: int) -> Bool[np.ndarray, "count"]:
    found = np.zeros(count, bool)
    found[numbers] = True
    return found


def _shares(granularity: Int[np.ndarray, "n"]) -> dict[str, float]:
    return dict(zip(GRANULARITIES, (np.bincount(granularity, minlength=3) / len(granularity)).tolist(), strict=True))


def _quantiles(difficulty: Float[np.ndarray, "n"]) -> dict[str, float]:
    values = np.quantile(difficulty, list(QUANTILES.values()))
    return dict(zip(QUANTILES, values.tolist(), strict=True))


def table(exposure: dict[str, Any]) -> str:
    """Returns what `describe` found as plain text: the data, and the first, middle and last piece."""
    visits, pieces, data = exposure["visits"], exposure["pieces"], exposure["data"]
    middle = pieces[len(pieces) // 2]
    rows = {"data": data, "first piece": pieces[0], "middle piece": middle, "last piece": pieces[-1]}
    lines = [
        f"{exposure['items']:,} items, {exposure['positions']:,} positions an epoch; {_epochs(exposure)};"
        f" an order is made in {exposure['order_seconds']:.2g} s",
        f"items visited: {visits['never']:,} never, {visits['once']:,} once, {visits['more']:,} more often, the most visited {visits['most']:,} x",
        f"tars visited: {pieces[-1]['tars_seen']:,} of {data['tars']:,}, at most {max(each['tars_here'] for each in pieces):,}"
        f" in one of {len(pieces)} pieces of about {pieces[0]['end']:,}",
        "",
        " " * 16 + "".join(f"{name:>12}" for name in (*GRANULARITIES, "difficulty:", *QUANTILES)),
    ]
    for name, each in rows.items():
        shares = "".join(f"{each['granularity'][key]:>12.1%}" for key in GRANULARITIES)
        lines.append(f"{name:16}{shares}{'':12}" + "".join(f"{each['difficulty'][key]:>12.3f}" for key in QUANTILES))
    return "\n".join(lines)


def _epochs(exposure: dict[str, Any]) -> str:
    return "one epoch" if exposure["epochs"] == 1 else f"{exposure['epochs']:,} epochs"


def write_picture(exposure: dict[str, Any], path: str | Path, title: str) -> None:
    """Draws what `describe` returned, 1600 pixels wide, in the format that the file's name asks for."""
    picture = Image.new("RGB", (WIDTH, HEAD + 2 * PANEL_HEIGHT + MARGIN), PAPER)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN + 8, 22), shorten(title, 30, WIDTH - 2 * MARGIN - 16), INK, font(30))
    pieces, data, visits = exposure["pieces"], exposure["data"], exposure["visits"]
    told = f"{_epochs(exposure)} of {exposure['positions']:,} samples from {exposure['items']:,} items"
    told += f"; each step of a curve is {pieces[0]['end']:,} samples" + ("; vertical lines end epochs" if 1 < exposure["epochs"] <= LINES else "")
    draw.text((MARGIN + 8, 66), told, FAINT, font(20))
    wide = (WIDTH - 2 * MARGIN) // 2
    corners = [(MARGIN + wide * column, HEAD + PANEL_HEIGHT * row) for row in (0, 1) for column in (0, 1)]
    panels = [Curves(draw, corner, (wide, PANEL_HEIGHT)) for corner in corners]
    for panel in panels[:3]:
        panel.over([each["end"] for each in pieces], exposure["epochs"])

    shares = {name: [100 * each["granularity"][name] for each in pieces] for name in GRANULARITIES}
    held = {name: 100 * share for name, share in data["granularity"].items()}
    panels[0].name("Granularity", "samples drawn", "% of the samples")
    panels[0].scale(max(max(map(max, shares.values())), *held.values()))
    for name, colour in zip(GRANULARITIES, (BLUE, ORANGE, GREEN), strict=True):
        panels[0].level(held[name], colour)
        panels[0].curve(shares[name], colour)
    panels[0].key({"fine": BLUE, "medium": ORANGE, "coarse": GREEN}, "in the data")

    spread = {name: [each["difficulty"][name] for each in pieces] for name in QUANTILES}
    panels[1].name("Difficulty", "samples drawn", "difficulty, 0 to 1")
    panels[1].scale(max(*spread["90%"], data["difficulty"]["90%"]), least_step=0.01)
    panels[1].band(spread["10%"], spread["90%"], BAND)
    for level in data["difficulty"].values():
        panels[1].level(level, BLUE)
    panels[1].curve(spread["median"], BLUE)
    panels[1].key({"median": BLUE, "10 to 90 %": BAND}, "the same of the data")

    panels[2].name("Tars", "samples drawn", "tars")
    panels[2].scale(data["tars"])
    panels[2].level(data["tars"], INK)
    panels[2].curve([each["tars_here"] for each in pieces], ORANGE, width=7)
    panels[2].curve([each["tars_seen"] for each in pieces], BLUE)
    panels[2].key({"visited so far": BLUE, "in a step of the curve": ORANGE}, "all")

    panels[3].name("Visits", f"visits in {_epochs(exposure)}; the most visited item has {visits['most']:,}", "items")
    panels[3].categories({name: visits[name] for name in ("never", "once", "more")}, exposure["items"])
    save(picture, path)


class Curves(Panel):
    """A diagram of what changes while samples are drawn: every curve has a level step for each piece of the sequence."""

    def over(self, ends: list[int], epochs: int) -> None:
        """Sets the pieces' ends and draws the horizontal axis, with a line at the end of each of a few epochs."""
        x0, y0, x1, y1 = self.box
        self.ends, self.top = ends, 1.0
        for epoch in range(1, epochs + 1) if 1 < epochs <= LINES else ():
            x = x0 + epoch / epochs * (x1 - x0)
            self.draw.line((x, y0, x, y1), BAND, 2)
        for value, _ in steps(0.0, float(ends[-1])):
            x = self._across(value)
            self.draw.line((x, y1, x, y1 + 5), FAINT)
            self.draw.text((x, y1 + 18), thousands(value), INK, font(15), anchor="mm")

    def scale(self, most: int | float, least_step: float = 1.0) -> None:
        """Draws the vertical axis, from 0 to `most`."""
        self.top = self.vertical(most, least_step)

    def curve(self, values: Sequence[int | float], colour: tuple[int, int, int], width: int = 3) -> None:
        """Draws one number's way over the pieces."""
        starts = [0, *self.ends]
        points = [(self._across(x), self._up(value)) for i, value in enumerate(values) for x in starts[i : i + 2]]
        self.draw.line(points, colour, width)

    def band(self, low: Sequence[float], high: Sequence[float], colour: tuple[int, int, int]) -> None:
        """Fills what lies between two numbers."""
        starts = [0, *self.ends]
        for i, (lower, upper) in enumerate(zip(low, high, strict=True)):
            self.draw.rectangle((self._across(starts[i]), self._up(upper), self._across(starts[i + 1]), self._up(lower)), colour)

    def level(self, value: int | float, colour: tuple[int, int, int]) -> None:
        """Draws a dashed line across."""
        x0, _, x1, _ = self.box
        for x in range(x0, x1, 2 * DASH):
            self.draw.line((x, self._up(value), min(x + DASH, x1), self._up(value)), colour, 1)

    def key(self, colours: dict[str, tuple[int, int, int]], dashed: str) -> None:
        """Writes what each colour is, and the dashes, from the right end of the title's line."""
        x, y = self.box[2], self.corner[1] + 24
        for name, colour in [*reversed(colours.items()), (dashed, None)]:
            self.draw.text((x, y), name, FAINT, font(16), anchor="rm")
            x -= round(font(16).getlength(name)) + 10
            if colour is None:
                for start in (x - 24, x - 10):
                    self.draw.line((start, y, start + DASH, y), INK, 1)
                x -= 42
            else:
                self.draw.rectangle((x - 12, y - 6, x, y + 6), colour)
                x -= 30

    def _across(self, position: int | float) -> int:
        x0, _, x1, _ = self.box
        return round(x0 + position / self.ends[-1] * (x1 - x0))

    def _up(self, value: int | float) -> int:
        _, y0, _, y1 = self.box
        return round(y1 - value / self.top * (y1 - y0))
