"""How hard a query is: its words enter, with what it asks for; counts of relations, a kind, a difficulty leave.

Source: the reference's `compute_grounding_difficulty` ("Curriculum for Spatial Grounding"), whose weights and limits are kept. Words are counted
where it says length, and phrases of `RELATIONS` where it says spatial terms.

Not here: the queries themselves (`data.queries`), samplers that make use of this (`samplers.curriculum`, `samplers.stratified`).
"""

import re

import numpy as np
from jaxtyping import Float, Float32, Int

AREA_WEIGHT, LENGTH_WEIGHT, OBJECTS_WEIGHT, RELATIONS_WEIGHT = 0.3, 0.2, 0.3, 0.2
"""What counts how much towards difficulty."""
MANY_WORDS, MANY_OBJECTS, MANY_RELATIONS = 50, 20, 5
"""A query with so many is as difficult, in that regard, as can be."""

COMPLEXITIES = ("simple", "compound", "relational")

RELATIONS = (
    *("above", "against", "along", "alongside", "among", "around", "behind", "below", "beneath", "beside", "between", "beyond", "far from"),
    *("in front of", "inside", "near", "nearest", "closest", "close to", "next to", "off", "on", "on top of", "opposite", "outside", "over"),
    *("left of", "to the left of", "on the left of", "right of", "to the right of", "on the right of", "under", "underneath", "within"),
    *("on the left", "on the right", "to the left", "to the right", "at the left", "at the right", "at the bottom", "at the top", "at the back"),
    *("at the front", "in the back", "in the background", "in the centre", "in the center", "in the corner", "in the foreground", "in the front"),
    *("in the middle", "on the bottom", "on the top", "leftmost", "rightmost", "topmost", "bottommost"),
)
"""Words and phrases that say where something lies."""

_RELATION = re.compile(rf"\b(?:{'|'.join(sorted(RELATIONS, key=len, reverse=True))})\b")
_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_EMPTY = frozenset(
    ("a", "all", "an", "any", "each", "every", "object", "objects", "of", "one", "some", "the", "these", "this", "thing", "things", "those")
)
_JOINTS = frozenset(("and", "but", "except", "not", "or", "that", "which", "who", "whose", "with", "without"))


def words(text: str) -> list[str]:
    """Returns the words of a text in small letters, without signs."""
    return _WORD.findall(text.lower())


def relations(text: str) -> int:
    """Counts the spatial relations in a text: whole phrases of `RELATIONS`, the longest that fits, each place of the text once."""
    return len(_RELATION.findall(" ".join(words(text))))


def complexity(text: str) -> int:
    """Returns which of `COMPLEXITIES` a text is.

    2 relational: it has a spatial relation. Else 1 compound: three words or more that carry meaning ("the red striped disc"), which articles, "all"
    and "object" do not, or a word that joins ("the cup with a handle", "dogs and cats"). Else 0 simple: a thing, at most one thing said of it.
    """
    if relations(text):
        return 2
    told = words(text)
    return int(sum(word not in _EMPTY for word in told) > 2 or not _JOINTS.isdisjoint(told))


def difficulty(
    area_share: Float[np.ndarray, "n"],
    length: Int[np.ndarray, "n"],
    objects: Int[np.ndarray, "n"],
    relations: Int[np.ndarray, "n"],
) -> Float32[np.ndarray, "n"]:
    """Returns how hard queries are, 0 to 1.

    `area_share` is the mean of the right masks' shares of the image, 0 where nothing fits: what is not there is as hard to make out as the smallest.
    `length` counts words, `objects` the image's masks, `relations` what the function of that name does.
    """
    told = AREA_WEIGHT * (1 - area_share.astype(np.float64)) + LENGTH_WEIGHT * np.minimum(1, length / MANY_WORDS)
    told += OBJECTS_WEIGHT * np.minimum(1, objects / MANY_OBJECTS) + RELATIONS_WEIGHT * np.minimum(1, relations / MANY_RELATIONS)
    return told.astype(np.float32)
