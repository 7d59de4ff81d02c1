"""Phrases that describe things by appearance and position, and whether they are true of a thing.

A phrase may state size, color, pattern and shape, and the position relative to another thing. Cases
that people could judge either way are neither true nor false: a medium thing as large, white and
gray stripes as gray, a thing above and slightly to the left as left.
"""

from typing import NamedTuple

import numpy as np


class Appearance(NamedTuple):
    """Properties of a thing, or stated in a phrase, as words of `WORDS`; None where not stated.

    A thing of medium size has the size None.
    """

    size: str | None = None
    color: str | None = None
    pattern: str | None = None
    shape: str | None = None


class Thing(NamedTuple):
    """A thing in a picture.

    Attributes:
        look: Its appearance.
        box: Its visible box `x0, y0, x1, y1`, ends inclusive.
        middle_xy: The mean of its visible pixels.
        area: The number of its visible pixels.
    """

    look: Appearance
    box: tuple[float, float, float, float]
    middle_xy: tuple[float, float]
    area: float


class Vocabulary(NamedTuple):
    """The words for each property."""

    size: tuple[str, ...]
    color: tuple[str, ...]
    pattern: tuple[str, ...]
    shape: tuple[str, ...]


WORDS = Vocabulary(
    size=("small", "large"),
    color=(
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
"""Other color words that people could use for a patterned thing, from its second color."""
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
"""Relations between two things, and their phrases."""
EXTREMES = {"largest": ("largest", "biggest"), "smallest": ("smallest",)}
APART = 1.35
"""Smallest ratio between the nearest and second nearest distance, or between the largest and second
largest area, that makes a superlative unambiguous."""


def matches(look: Appearance, wanted: Appearance) -> bool | None:
    """Return whether a description is true of an appearance, None if it is ambiguous.

    Args:
        look: The appearance of a thing.
        wanted: The description.
    """
    vague = False
    for word, has, alike in zip(wanted, look, _ambiguous_words(look), strict=True):
        if word is not None and word != has:
            if word not in alike:
                return False
            vague = True
    return None if vague else True


def _ambiguous_words(look: Appearance) -> tuple[tuple[str, ...], ...]:
    """Return for each property the words that are ambiguous for this appearance."""
    colors = LOOKALIKES.get(look.color or "", ()) if look.pattern != "plain" else ()
    return (WORDS.size if look.size is None else (), colors, (), ())


def satisfies(thing: Thing, relation: str, anchor: Thing) -> bool | None:
    """Return whether a thing is left of another (or right, above, below), None if ambiguous.

    True if the boxes are separate in that direction and the centers differ at least as much along
    it as across it. False if the centers are level or differ in the opposite direction.

    Args:
        thing: The thing.
        relation: "left", "right", "above" or "below".
        anchor: The other thing.
    """
    axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    along = sign * (thing.middle_xy[axis] - anchor.middle_xy[axis])
    across = abs(thing.middle_xy[1 - axis] - anchor.middle_xy[1 - axis])
    if along <= 0:
        return False
    first, then = (anchor, thing) if sign > 0 else (thing, anchor)
    return True if first.box[axis + 2] < then.box[axis] and along >= across else None


def nearest(things: list[Thing], anchor: Thing) -> int | None:
    """Return which thing is unambiguously the nearest to another, None if there is none.

    Args:
        things: The candidates.
        anchor: The other thing.
    """
    middles = [
        float(
            np.hypot(
                thing.middle_xy[0] - anchor.middle_xy[0], thing.middle_xy[1] - anchor.middle_xy[1]
            )
        )
        for thing in things
    ]
    gaps = [_gap(thing.box, anchor.box) for thing in things]
    first, second = np.argsort(middles)[:2].tolist()
    return first if APART * middles[first] <= middles[second] and gaps[first] == min(gaps) else None


def _gap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    across, down = (
        max(0.0, one[axis] - other[axis + 2], other[axis] - one[axis + 2]) for axis in (0, 1)
    )
    return float(np.hypot(across, down))


def extreme(things: list[Thing], which: str) -> int | None:
    """Return which thing is unambiguously the largest or smallest, None if there is none.

    Both its area and the longer side of its box must be the extreme.

    Args:
        things: The candidates.
        which: "largest" or "smallest".
    """
    sign = 1 if which == "largest" else -1
    areas = np.array([thing.area for thing in things], float) ** sign
    boxes = [thing.box for thing in things]
    sides = np.array([max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes], float) ** sign
    first, second = np.argsort(-areas)[:2].tolist()
    return first if areas[first] >= APART * areas[second] and sides[first] == sides.max() else None


def describe_one(
    generator: np.random.Generator, wanted: Appearance, rank: str | None = None
) -> str:
    """Return a phrase for a single thing, such as "the large red disc with stripes".

    Args:
        generator: Random numbers.
        wanted: The description.
        rank: One of `EXTREMES`, if it is a superlative.
    """
    article = "the " if rank or generator.random() < 0.8 else ""
    superlative = f"{_choose(generator, EXTREMES[rank])} " if rank else ""
    return f"{article}{superlative}{_noun(generator, wanted, plural=False)}"


def describe_all(generator: np.random.Generator, wanted: Appearance, pair: bool = False) -> str:
    """Return a phrase for all things of an appearance.

    Args:
        generator: Random numbers.
        wanted: The description.
        pair: Whether there are two of them, so that the phrase may begin with "both".
    """
    articles = ["all ", "all the ", "the ", "every ", ""] + ["both "] * pair
    article = _choose(generator, articles)
    return article + _noun(generator, wanted, plural=article != "every ")


def describe_relation(
    generator: np.random.Generator, wanted: Appearance, relation: str, anchor: Appearance
) -> str:
    """Return a phrase for a single thing by its relation to another.

    Args:
        generator: Random numbers.
        wanted: The description of the thing.
        relation: One of `RELATIONS`.
        anchor: The description of the other thing.
    """
    thing = describe_one(generator, wanted)
    words = _choose(generator, RELATIONS[relation])
    return f"{thing} {words} the {_noun(generator, anchor, plural=False)}"


def _noun(generator: np.random.Generator, wanted: Appearance, plural: bool) -> str:
    """Return the phrase without its article; the pattern is before or after the color, or last."""
    noun = wanted.shape or _choose(generator, ANYTHING)
    word = _choose(generator, SYNONYMS.get(noun, (noun,)))
    words = [word if not plural else PLURALS.get(word, f"{word}s")]
    if wanted.pattern in SUFFIXES and generator.random() < 0.25:
        words.append(SUFFIXES[wanted.pattern])
        looks = [wanted.color]
    else:
        looks = (
            [wanted.color, wanted.pattern]
            if generator.random() < 0.4
            else [wanted.pattern, wanted.color]
        )
    size = wanted.size and _choose(generator, SYNONYMS.get(wanted.size, (wanted.size,)))
    return " ".join(word for word in (size, *looks, *words) if word)


def _choose(generator: np.random.Generator, ways: tuple[str, ...] | list[str]) -> str:
    return ways[int(generator.integers(len(ways)))]
