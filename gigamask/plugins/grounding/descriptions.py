"""Phrases that describe objects by appearance and position, and whether they are true.

A phrase may state size, color, pattern and shape, and the position relative to another object.
Cases that people could judge either way are neither true nor false: a medium object as large, white
and gray stripes as gray, an object above and slightly to the left as left.
"""

from math import dist, hypot
from typing import NamedTuple

import numpy as np
from numpy.random import Generator


class Appearance(NamedTuple):
    """Properties of an object, or stated in a phrase, as words of `WORDS`; None where not stated.

    An object of medium size has the size None.
    """

    size: str | None = None
    color: str | None = None
    pattern: str | None = None
    shape: str | None = None


class SceneObject(NamedTuple):
    """An object in a scene.

    Attributes:
        appearance: Its appearance.
        box: Its visible box `x0, y0, x1, y1`, ends inclusive.
        center_xy: The mean of its visible pixels.
        area: The number of its visible pixels.
    """

    appearance: Appearance
    box: tuple[float, float, float, float]
    center_xy: tuple[float, float]
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
"""Other color words that people could use for a patterned object, from its second color."""
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
"""Relations between two objects, and their phrases."""
EXTREMES = {"largest": ("largest", "biggest"), "smallest": ("smallest",)}
APART = 1.35
"""Smallest ratio between the nearest and second nearest distance, or between the largest and second
largest area, that makes a superlative unambiguous."""


def matches(appearance: Appearance, wanted: Appearance) -> bool | None:
    """Return whether a description is true of an appearance, None if it is ambiguous.

    Args:
        appearance: The appearance of an object.
        wanted: The description.
    """
    vague = False
    for word, has, alike in zip(wanted, appearance, _ambiguous_words(appearance), strict=True):
        if word is not None and word != has:
            if word not in alike:
                return False
            vague = True
    return None if vague else True


def _ambiguous_words(appearance: Appearance) -> tuple[tuple[str, ...], ...]:
    """Return for each property the words that are ambiguous for this appearance."""
    colors = LOOKALIKES.get(appearance.color or "", ()) if appearance.pattern != "plain" else ()
    return (WORDS.size if appearance.size is None else (), colors, (), ())


def satisfies(subject: SceneObject, relation: str, anchor: SceneObject) -> bool | None:
    """Return whether an object is left of another (or right, above, below), None if ambiguous.

    True if the boxes are separate in that direction and the centers differ at least as much along
    it as across it. False if the centers are level or differ in the opposite direction.

    Args:
        subject: The object.
        relation: "left", "right", "above" or "below".
        anchor: The other object.
    """
    axis, sign = {"left": (0, -1), "right": (0, 1), "above": (1, -1), "below": (1, 1)}[relation]
    along = sign * (subject.center_xy[axis] - anchor.center_xy[axis])
    across = abs(subject.center_xy[1 - axis] - anchor.center_xy[1 - axis])
    if along <= 0:
        return False
    first, then = (anchor, subject) if sign > 0 else (subject, anchor)
    return True if first.box[axis + 2] < then.box[axis] and along >= across else None


def nearest(objects: list[SceneObject], anchor: SceneObject) -> int | None:
    """Return which object is unambiguously the nearest to another, None if there is none.

    Args:
        objects: The candidates.
        anchor: The other object.
    """
    distances = [dist(candidate.center_xy, anchor.center_xy) for candidate in objects]
    gaps = [_gap(candidate.box, anchor.box) for candidate in objects]
    first, second = np.argsort(distances)[:2].tolist()
    return (
        first
        if APART * distances[first] <= distances[second] and gaps[first] == min(gaps)
        else None
    )


def _gap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    across, down = (
        max(0.0, one[axis] - other[axis + 2], other[axis] - one[axis + 2]) for axis in (0, 1)
    )
    return hypot(across, down)


def extreme(objects: list[SceneObject], which: str) -> int | None:
    """Return which object is unambiguously the largest or smallest, None if there is none.

    Both its area and the longer side of its box must be the extreme.

    Args:
        objects: The candidates.
        which: "largest" or "smallest".
    """
    sign = 1 if which == "largest" else -1
    areas = np.array([candidate.area for candidate in objects], float) ** sign
    boxes = [candidate.box for candidate in objects]
    sides = np.array([max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes], float) ** sign
    first, second = np.argsort(-areas)[:2].tolist()
    return first if areas[first] >= APART * areas[second] and sides[first] == sides.max() else None


def describe_one(generator: Generator, wanted: Appearance, rank: str | None = None) -> str:
    """Return a phrase for a single object, such as "the large red disc with stripes".

    Args:
        generator: Random numbers.
        wanted: The description.
        rank: One of `EXTREMES`, if it is a superlative.
    """
    article = "the " if rank or generator.random() < 0.8 else ""
    superlative = f"{_choose(generator, EXTREMES[rank])} " if rank else ""
    return f"{article}{superlative}{_noun(generator, wanted, plural=False)}"


def describe_all(generator: Generator, wanted: Appearance, pair: bool = False) -> str:
    """Return a phrase for all objects of an appearance.

    Args:
        generator: Random numbers.
        wanted: The description.
        pair: Whether there are two of them, so that the phrase may begin with "both".
    """
    articles = ["all ", "all the ", "the ", "every ", ""] + ["both "] * pair
    article = _choose(generator, articles)
    return article + _noun(generator, wanted, plural=article != "every ")


def describe_relation(
    generator: Generator, wanted: Appearance, relation: str, anchor: Appearance
) -> str:
    """Return a phrase for a single object by its relation to another.

    Args:
        generator: Random numbers.
        wanted: The description of the object.
        relation: One of `RELATIONS`.
        anchor: The description of the other object.
    """
    phrase = describe_one(generator, wanted)
    words = _choose(generator, RELATIONS[relation])
    return f"{phrase} {words} the {_noun(generator, anchor, plural=False)}"


def _noun(generator: Generator, wanted: Appearance, plural: bool) -> str:
    """Return the phrase without its article; the pattern is before or after the color, or last."""
    noun = wanted.shape or _choose(generator, ANYTHING)
    word = _choose(generator, SYNONYMS.get(noun, (noun,)))
    words = [word if not plural else PLURALS.get(word, f"{word}s")]
    if wanted.pattern in SUFFIXES and generator.random() < 0.25:
        words.append(SUFFIXES[wanted.pattern])
        adjectives = [wanted.color]
    else:
        adjectives = (
            [wanted.color, wanted.pattern]
            if generator.random() < 0.4
            else [wanted.pattern, wanted.color]
        )
    size = wanted.size and _choose(generator, SYNONYMS.get(wanted.size, (wanted.size,)))
    return " ".join(word for word in (size, *adjectives, *words) if word)


def _choose(generator: Generator, ways: tuple[str, ...] | list[str]) -> str:
    return ways[int(generator.integers(len(ways)))]
