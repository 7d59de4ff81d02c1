"""Histograms: a column of numbers enters, edges and counts leave, and one picture of all that `statistics.describe` counted.

Not here: the columns (`prepare.statistics`), curves over a training (`prepare.exposure`).
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from PIL import Image, ImageDraw, ImageFont

from gigamask.faults import Fault

MOST_BARS = 40
LEAST_BARS = 10
"""An axis has room for so many: the bar of equal values, alone, would fill it and not show where they lie."""
PER_DECADE = 8
DECADES = 9
"""Of a logarithmic axis, at most: what is smaller is counted in its lowest bar."""
WIDTH, PANEL_HEIGHT, HEAD, MARGIN = 1600, 400, 110, 24
# Within a panel: where the axes' box lies.
LEFT, RIGHT, TOP, BOTTOM = 96, 24, 64, 62
INK, FAINT, GRID, PAPER = (32, 36, 44), (112, 119, 131), (229, 232, 237), (255, 255, 255)
COLOURS = ((51, 111, 184), (226, 125, 54))
# Title, what the horizontal axis says, what is counted, and the distributions drawn, one over the other.
PANELS = (
    ("Masks per image", "masks of an image", "images", ("masks per image",)),
    ("Mask area", "share of the image, logarithmic", "masks", ("mask area share",)),
    ("Granularity", "", "masks", ("granularity",)),
    ("Image size", "pixels", "images", ("short side", "long side")),
    ("Predicted IoU", "predicted_iou", "masks", ("predicted_iou",)),
    ("Stability", "stability_score", "masks", ("stability_score",)),
)


def count(column: Shaped[np.ndarray, "n"], logarithmic: bool = False) -> dict[str, list]:
    """Returns `{"edges", "counts"}` of a column that is not empty: bars of equal width on round numbers, or of equal ratio.

    A bar holds what lies from its left edge up to, but not including, its right one; whole numbers get bars of whole width.
    """
    values = column.astype(np.float64)
    if logarithmic:
        shown = np.log10(np.maximum(values, np.finfo(np.float64).tiny))
        top = math.ceil(shown.max() * PER_DECADE) / PER_DECADE
        shown = np.maximum(shown, max(shown.min(), top - DECADES))
        first, last = math.floor(shown.min() * PER_DECADE), max(math.ceil(shown.max() * PER_DECADE), math.floor(shown.min() * PER_DECADE) + 1)
        places, edges = np.floor(shown * PER_DECADE) - first, 10.0 ** (np.arange(first, last + 1) / PER_DECADE)
    else:
        step = round_step((values.max() - values.min()) / MOST_BARS)
        step = max(step, 1.0) if column.dtype.kind in "iu" else step
        # Numbers that were rounded in float32 belong to the bar of the number they stand for.
        places = np.floor(values / step + 1e-5)
        first, last = int(places.min()), int(places.max()) + 1
        places, edges = places - first, np.round(np.arange(first, last + 1) * step, 12)
    bars = len(edges) - 1
    return {"edges": edges.tolist(), "counts": np.bincount(np.clip(places, 0, bars - 1).astype(np.int64), minlength=bars).tolist()}


def round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5 times a power of ten that is not below `least`; a hundredth where that is next to nothing."""
    if least < 1e-9:
        return 0.01
    power = 10.0 ** math.floor(math.log10(least))
    return next(round(power * factor, 12) for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def write_picture(stats: dict[str, Any], path: str | Path, title: str) -> None:
    """Draws what `statistics.describe` returned, 1600 pixels wide, in the format that the file's name asks for."""
    picture = Image.new("RGB", (WIDTH, HEAD + PANEL_HEIGHT * -(-len(PANELS) // 2) + MARGIN), PAPER)
    draw = ImageDraw.Draw(picture)
    room = WIDTH - 2 * MARGIN - 16
    draw.text((MARGIN + 8, 22), shorten(title, 30, room), INK, font(30))
    rows = stats["sampled_rows"]
    thinned = rows["images"] < stats["images"] or rows["masks"] < stats["masks"]
    told = f"; bars count {rows['images']:,} images and {rows['masks']:,} masks at an even stride" if thinned else ""
    draw.text((MARGIN + 8, 66), f"{stats['images']:,} images, {stats['masks']:,} masks, {stats['tars']:,} tars{told}", FAINT, font(20))
    wide = (WIDTH - 2 * MARGIN) // 2
    for number, (name, axis, counted, held) in enumerate(PANELS):
        corner = (MARGIN + wide * (number % 2), HEAD + PANEL_HEIGHT * (number // 2))
        panel = Panel(draw, corner, (wide, PANEL_HEIGHT))
        panel.name(name, axis, counted)
        if held == ("granularity",):
            panel.categories(stats["granularity"], stats["masks"])
        else:
            drawn = {key: (stats["histograms"][key], stats["distributions"][key]) for key in held if key in stats["histograms"]}
            panel.histograms(drawn, logarithmic="logarithmic" in axis, from_zero=counted == "images")
    save(picture, path)


def save(picture: Image.Image, path: str | Path) -> None:
    """Writes a picture in the format that the file's name asks for."""
    try:
        picture.save(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Fault(f"--picture {path}: cannot be written ({why}); name a .png file in a folder that exists") from None


class Panel:
    """One diagram: its corner and size in the picture are given, the rest follows."""

    def __init__(self, draw: ImageDraw.ImageDraw, corner: tuple[int, int], size: tuple[int, int]) -> None:
        self.draw = draw
        self.corner = corner
        self.box = (corner[0] + LEFT, corner[1] + TOP, corner[0] + size[0] - RIGHT, corner[1] + size[1] - BOTTOM)

    def name(self, name: str, axis: str, counted: str) -> None:
        """Writes the title and what the axes say."""
        x0, _, x1, y1 = self.box
        self.draw.text((self.corner[0] + 8, self.corner[1] + 10), name, INK, font(22))
        self.draw.text(((x0 + x1) // 2, y1 + 46), axis, FAINT, font(16), anchor="mm")
        self.draw.text((self.corner[0] + 8, self.corner[1] + 46), counted, FAINT, font(16), anchor="lm")

    def histograms(self, drawn: dict[str, tuple[dict[str, list], dict[str, float]]], logarithmic: bool, from_zero: bool) -> None:
        """Draws one histogram, or several on the same axes, their bars beside one another, with their medians and means."""
        if not drawn:
            self.draw.text(((self.box[0] + self.box[2]) // 2, (self.box[1] + self.box[3]) // 2), "none", FAINT, font(20), anchor="mm")
            return
        scale = math.log10 if logarithmic else float
        edges = [[scale(edge) for edge in histogram["edges"]] for histogram, _ in drawn.values()]
        low, high = min(each[0] for each in edges), max(each[-1] for each in edges)
        room, least = LEAST_BARS * (edges[0][1] - edges[0][0]), -math.inf if logarithmic else 0.0
        low = 0.0 if from_zero else min(low, max(high - room, least))
        high = max(high, low + room)
        x0, y0, x1, y1 = self.box

        def place(value: float) -> float:
            return x0 + (min(max(scale(value), low), high) - low) / (high - low) * (x1 - x0)

        most = self.vertical(max(max(histogram["counts"]) for histogram, _ in drawn.values()))
        for number, (histogram, _) in enumerate(drawn.values()):
            places = [place(edge) for edge in histogram["edges"]]
            for left, right, bar in zip(places, places[1:], histogram["counts"], strict=False):
                wide = (right - left) / len(drawn)
                start, top = round(left + number * wide), round(y1 - bar / most * (y1 - y0))
                if bar:
                    self.draw.rectangle((start, min(top, y1 - 2), max(round(left + (number + 1) * wide) - 2, start + 3), y1), COLOURS[number])
        for value, text in decades(low, high) if logarithmic else steps(low, high):
            x = round(place(value))
            self.draw.line((x, y1, x, y1 + 5), FAINT)
            self.draw.text((x, y1 + 18), text, INK, font(15), anchor="mm")
        shown = percent if logarithmic else short
        self.legend({name: f"median {shown(told['median'])}, mean {shown(told['mean'])}" for name, (_, told) in drawn.items()})

    def categories(self, counts: dict[str, int], total: int) -> None:
        """Draws a bar for each name, with its share."""
        x0, y0, x1, y1 = self.box
        most, wide = self.vertical(max([*counts.values(), 1])), (x1 - x0) / len(counts)
        for number, (name, bar) in enumerate(counts.items()):
            middle, top = round(x0 + (number + 0.5) * wide), round(y1 - bar / most * (y1 - y0))
            self.draw.rectangle((middle - wide // 3, min(top, y1 - 1), middle + wide // 3, y1), COLOURS[0])
            self.draw.text((middle, top - 12), f"{bar / max(total, 1):.1%}", INK, font(17), anchor="mm")
            self.draw.text((middle, y1 + 20), name, INK, font(16), anchor="mm")

    def vertical(self, most: int | float, least_step: float = 1.0) -> float:
        """Draws the vertical axis for numbers up to `most`, counts by default, and returns the number at its upper end."""
        x0, y0, x1, y1 = self.box
        step = max(round_step(most / 5), least_step)
        top = max(most * 1.08, step)
        for number in range(int(top / step) + 1):
            y = round(y1 - number * step / top * (y1 - y0))
            self.draw.line((x0, y, x1, y), GRID if number else FAINT)
            self.draw.text((x0 - 10, y), thousands(number * step), INK, font(15), anchor="rm")
        return top

    def legend(self, told: dict[str, str]) -> None:
        """Writes what each colour is and its middle, from the right end of the title's line."""
        x, y = self.box[2], self.corner[1] + 24
        for colour, (name, text) in reversed(list(zip(COLOURS, told.items(), strict=False))):
            text = f"{name}: {text}" if len(told) > 1 else text
            self.draw.text((x, y), text, FAINT, font(16), anchor="rm")
            x -= round(font(16).getlength(text)) + 12
            if len(told) > 1:
                self.draw.rectangle((x - 10, y - 5, x, y + 5), colour)
                x -= 28


def steps(low: float, high: float) -> list[tuple[float, str]]:
    """Returns about eight round numbers within, as text too."""
    step = round_step((high - low) / 8)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(number * step, f"{number * step:,.{digits}f}") for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def decades(low: float, high: float) -> list[tuple[float, str]]:
    """Returns the powers of ten within, as percentages."""
    return [(10.0**power, percent(10.0**power)) for power in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)]


def short(value: float) -> str:
    """Returns three digits of a number, more of a large one."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    """Returns a share as a percentage of two digits, or as many as it takes."""
    return f"{float(f'{100 * share:.2g}'):g}%"


def thousands(value: int | float) -> str:
    """Returns a count as axes show it: 800, 1.5k, 20M, 1.1G."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:g}{unit}"
        value /= 1000
    return f"{value:g}G"


def shorten(text: str, size: int, room: int) -> str:
    """Returns the text, its beginning left out where it is too long."""
    if font(size).getlength(text) <= room:
        return text
    while text and font(size).getlength("..." + text) > room:
        text = text[1:]
    return "..." + text


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Returns the typeface that Pillow brings along."""
    return ImageFont.load_default(size)
