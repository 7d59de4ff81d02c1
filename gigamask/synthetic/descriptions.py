"""What can be said of things that are seen: their looks and places enter, phrases, and whether they are true of a thing, leave.

A phrase says of a thing its size, colour, pattern and shape, any of them or none, and perhaps where it lies beside another thing. What a person could
take either way is neither true nor false: a thing of medium size is neither large nor certainly not, one with white and grey stripes neither grey nor
certainly not, and one that is above and a little to the left neither left nor certainly not.

Not here: which things are asked for (`prepare.questions`), how they are painted (`prepare.describable`).
"""

from typing import NamedTuple

import numpy as np


class Appearance(NamedTuple):
    """What is said of a thing, as words of `WORDS`; None where nothing is said. A thing of medium size has the size None, else it has all sides."""

    size: str | None = None
    colour: str | None = None
    pattern: str | None = None
    shape: str | None = None


class Thing(NamedTuple):
    """A thing in a picture: how it looks, and what can be seen of it: its box `x0, y0, x1, y1` with inclusive ends, its middle, its pixels."""

    look: Appearance
    box: tuple[float, float, float, float]
    middle_xy: tuple[float, float]
    area: float


class Wanted(NamedTuple):
    """The words for each side of a look."""

    size: tuple[str, ...]
    colour: tuple[str, ...]
    pattern: tuple[str, ...]
    shape: tuple[str, ...]


WORDS = Wanted(
    size=("small", "large"),
    colour=(
        "red",
        "green",
        "blue",
        "yellow",
        "orange",
        "purple",
        "pink",
        "brown",
        "white",
        "black",
        "grey",
    ),
    pattern=("plain", "striped", "dotted", "checked"),
    shape=("disc", "box", "star", "ring", "triangle", "cross"),
)
LOOKALIKES = {"white": ("grey",), "black": ("grey",), "grey": ("black", "white")}
"""What a patterned thing could be called by its second colour."""
SYNONYMS = {"large": ("large", "big"), "disc": ("disc", "circle"), "box": ("box", "square")}
PLURALS = {"box": "boxes", "cross": "crosses"}
ANYTHING = ("object", "thing", "shape")
SUFFIXES = {"striped": "with stripes", "dotted": "with dots", "checked": "with checks"}
RELATIONS = {
    "left": ("left of", "to the left of"),
    "right": ("right of", "to the right of"),
    "above": ("above",),
    "below": ("below", "under"),
    "nearest": ("nearest to", "closest to"),
}
"""The places of a thing beside another, and how they are put."""
EXTREMES = {"largest": ("largest", "biggest"), "smallest": ("smallest",)}
APART = 1.35
"""How many times farther than the nearest thing, or smaller than the largest, the next is at least, so that it is plain which one is meant."""


def meets(look: Appearance, wanted: Appearance) -> bool | None:
    """Says whether all that is wanted is true of a look, None where it depends on what one calls large, small or grey."""
    vague = False
    for word, has, alike in zip(wanted, look, _alike(look), strict=True):
        if word is not None and word != has:
            if word not in alike:
                return False
            vague = True
    return None if vague else True


def _alike(look: Appearance) -> tuple[tuple[str, ...], ...]:
    """Returns for each side of a look the words that are not true of it and could be said all the same."""
    colours = LOOKALIKES.get(look.colour or "", ()) if look.pattern != "plain" else ()
    return (WORDS.size if look.size is None else (), colours, (), ())


def lies(thing: Thing, relation: str, anchor: Thing) -> bool | None:
    """Says whether a thing lies left of another, and so on, `nearest` aside.

    It does where their boxes are apart in that direction, in which their middles differ at least as much as in the other. It does not where the
    middles differ the other way. Else None.
    """
    axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    along = sign * (thing.middle_xy[axis] - anchor.middle_xy[axis])
    across = abs(thing.middle_xy[1 - axis] - anchor.middle_xy[1 - axis])
    if along <= 0:
        return False
    first, then = (anchor, thing) if sign > 0 else (thing, anchor)
    return True if first.box[axis + 2] < then.box[axis] and along >= across else None


def nearest(things: list[Thing], anchor: Thing) -> int | None:
    """Returns which of several things is plainly the nearest to another, by their middles and by the gap between their boxes; None where none is."""
    middles = [
        float(
            np.hypot(
                each.middle_xy[0] - anchor.middle_xy[0], each.middle_xy[1] - anchor.middle_xy[1]
            )
        )
        for each in things
    ]
    gaps = [_gap(each.box, anchor.box) for each in things]
    first, second = np.argsort(middles)[:2].tolist()
    return first if APART * middles[first] <= middles[second] and gaps[first] == min(gaps) else None


def _gap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    across, down = (
        max(0.0, one[axis] - other[axis + 2], other[axis] - one[axis + 2]) for axis in (0, 1)
    )
    return float(np.hypot(across, down))


def extreme(things: list[Thing], which: str) -> int | None:
    """Returns which of several things is plainly the largest or the smallest, by its pixels and by its box's longer side; None where none is."""
    sign = 1 if which == "largest" else -1
    areas = np.array([each.area for each in things], float) ** sign
    sides = (
        np.array(
            [max(each.box[2] - each.box[0], each.box[3] - each.box[1]) for each in things], float
        )
        ** sign
    )
    first, second = np.argsort(-areas)[:2].tolist()
    return first if areas[first] >= APART * areas[second] and sides[first] == sides.max() else None


def one(generator: np.random.Generator, wanted: Appearance, rank: str | None = None) -> str:
    """Returns a phrase for a single thing, such as "the large red disc with stripes"; `rank` is one of `EXTREMES`."""
    article = "the " if rank or generator.random() < 0.8 else ""
    return f"{article}{_put(generator, EXTREMES[rank]) + ' ' if rank else ''}{_noun(generator, wanted, plural=False)}"


def several(generator: np.random.Generator, wanted: Appearance, pair: bool = False) -> str:
    """Returns a phrase for all things of a look; for a `pair` it may be "both"."""
    articles = ["all ", "all the ", "the ", "every ", ""] + ["both "] * pair
    article = _put(generator, articles)
    return article + _noun(generator, wanted, plural=article != "every ")


def beside(
    generator: np.random.Generator, wanted: Appearance, relation: str, anchor: Appearance
) -> str:
    """Returns a phrase for a single thing by where it lies beside another."""
    return f"{one(generator, wanted)} {_put(generator, RELATIONS[relation])} the {_noun(generator, anchor, plural=False)}"


def _noun(generator: np.random.Generator, wanted: Appearance, plural: bool) -> str:
    """Returns the phrase without its article; the pattern stands before the colour, behind it, or at the end."""
    noun = wanted.shape or _put(generator, ANYTHING)
    word = _put(generator, SYNONYMS.get(noun, (noun,)))
    words = [word if not plural else PLURALS.get(word, f"{word}s")]
    if wanted.pattern in SUFFIXES and generator.random() < 0.25:
        words.append(SUFFIXES[wanted.pattern])
        looks = [wanted.colour]
    else:
        looks = (
            [wanted.colour, wanted.pattern]
            if generator.random() < 0.4
            else [wanted.pattern, wanted.colour]
        )
    size = wanted.size and _put(generator, SYNONYMS.get(wanted.size, (wanted.size,)))
    return " ".join(word for word in (size, *looks, *words) if word)


def _put(generator: np.random.Generator, ways: tuple[str, ...] | list[str]) -> str:
    return ways[int(generator.integers(len(ways)))]
