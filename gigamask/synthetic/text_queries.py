"""What is asked of a describable scene: its things enter, phrases leave, each with the things that it means.

Kinds and how many of each a scene has, where it has that many plain ones: attribute (one thing by its look, 4), relation (one of several things of a
look by where it lies beside another, 3), several (all things of a look, 2), absent (nothing that is there, 1 look that differs from one there in one
word and 1 relation that none of the things of that look is in), size (the largest or smallest of a look, 1).
Every phrase is plain: where it could mean another thing, or where it could be said of none (`descriptions.meets`, `lies`), it is not asked.

Not here: what phrases mean, and their words (`prepare.descriptions`).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from gigamask.synthetic import descriptions
from gigamask.synthetic.descriptions import EXTREMES, RELATIONS, WORDS, Appearance, Thing

KINDS = ("attribute", "relation", "several", "absent", "size")
ATTRIBUTE, RELATION, SEVERAL, ABSENT_LOOK, ABSENT_RELATION, SIZE = 4, 3, 2, 1, 1, 1
"""Questions of each kind, two of them absent."""
SAID = list(product((False, True), repeat=len(WORDS)))
"""Which sides of a look can be said."""
LOOKS_TRIED, RELATIONS_TRIED = 20, 120
RELATION_ODDS = (0.2425, 0.2425, 0.2425, 0.2425, 0.03)
"""Some thing is plainly the nearest more often than one alone is plainly on a side."""


class TextQuery(NamedTuple):
    """A phrase, the numbers of the things that it means, and its kind."""

    text: str
    right: tuple[int, ...]
    kind: str


class Fits(NamedTuple):
    """The things that a look is true of, and whether it could be said of others, too."""

    right: tuple[int, ...]
    vague: bool


def ask(generator: np.random.Generator, things: Sequence[Thing]) -> list[TextQuery]:
    """Returns what is asked of these things, no phrase twice."""
    known = _looks(things)
    kinds = (
        (ATTRIBUTE, _by_look(generator, known)),
        (RELATION, _by_relation(generator, things, known)),
        (SEVERAL, _all_of(generator, known, len(things))),
        (ABSENT_LOOK, _look_of_none(generator, things, known)),
        (ABSENT_RELATION, _relation_of_none(generator, things, known)),
        (SIZE, _by_size(generator, things, known)),
    )
    asked: dict[str, TextQuery] = {}
    for number, found in kinds:
        wanted = len(asked) + number
        for question in found:
            asked.setdefault(question.text, question)
            if len(asked) == wanted:
                break
    return list(asked.values())


def _looks(things: Sequence[Thing]) -> dict[Appearance, Fits]:
    """Returns all that can be said of some thing, and of which it is true."""
    told = {
        Appearance(*(has if say else None for has, say in zip(thing.look, said, strict=True))): None
        for thing in things
        for said in SAID
    }
    return {look: fits(things, look) for look in told}


def fits(things: Sequence[Thing], wanted: Appearance) -> Fits:
    """Returns which things a look is true of."""
    found = [descriptions.meets(thing.look, wanted) for thing in things]
    return Fits(tuple(number for number, meets in enumerate(found) if meets), None in found)


def _length(look: Appearance) -> int:
    return sum(word is not None for word in look)


def _by_look(generator: np.random.Generator, known: dict[Appearance, Fits]) -> Iterator[TextQuery]:
    """Asks for one thing after the other by a look that only it has."""
    for look in _unique(generator, known):
        yield TextQuery(descriptions.one(generator, look), known[look].right, "attribute")


def _unique(generator: np.random.Generator, known: dict[Appearance, Fits]) -> Iterator[Appearance]:
    """Yields looks that only one thing has, one for each thing that has such; mostly one of which no word can be left out."""
    unique = {
        look: held.right[0]
        for look, held in known.items()
        if len(held.right) == 1 and not held.vague
    }
    for number in generator.permutation(sorted(set(unique.values()))).tolist():
        looks = [look for look, thing in unique.items() if thing == number]
        odds = np.array([3.0 if _shortest(look, unique) else 1.0 for look in looks])
        yield looks[int(generator.choice(len(looks), p=odds / odds.sum()))]


def _shortest(look: Appearance, unique: dict[Appearance, int]) -> bool:
    return not any(
        word is not None and look._replace(**{side: None}) in unique
        for side, word in zip(look._fields, look, strict=True)
    )


def _all_of(
    generator: np.random.Generator, known: dict[Appearance, Fits], things: int
) -> Iterator[TextQuery]:
    """Asks for all things of a look of one to three words that several have but not all."""
    looks = [
        look
        for look, held in known.items()
        if 2 <= len(held.right) < things and not held.vague and 1 <= _length(look) <= 3
    ]
    for place in generator.permutation(len(looks)).tolist():
        right = known[looks[place]].right
        yield TextQuery(
            descriptions.several(generator, looks[place], pair=len(right) == 2), right, "several"
        )


def _by_size(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Fits]
) -> Iterator[TextQuery]:
    """Asks for the largest or smallest of the things of a look that does not name a size."""
    looks = [
        look
        for look, held in known.items()
        if len(held.right) >= 2 and look.size is None and _length(look) <= 2
    ]
    for place in generator.permutation(len(looks)).tolist()[:LOOKS_TRIED]:
        which = str(generator.choice(list(EXTREMES)))
        right = known[looks[place]].right
        found = descriptions.extreme([things[number] for number in right], which)
        if found is not None:
            yield TextQuery(
                descriptions.one(generator, looks[place], which), (right[found],), "size"
            )


def _by_relation(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Fits]
) -> Iterator[TextQuery]:
    """Asks for one of several things of a look by where it alone lies."""
    for look, relation, anchor in _pairings(generator, known):
        right = [number for number in known[look].right if number != known[anchor].right[0]]
        there = [things[number] for number in right]
        beside = things[known[anchor].right[0]]
        if len(right) < 2:
            continue
        if relation == "nearest":
            found = descriptions.nearest(there, beside)
        else:
            lies = [descriptions.lies(thing, relation, beside) for thing in there]
            found = lies.index(True) if lies.count(True) == 1 and None not in lies else None
        if found is not None:
            yield TextQuery(
                descriptions.beside(generator, look, relation, anchor), (right[found],), "relation"
            )


def _relation_of_none(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Fits]
) -> Iterator[TextQuery]:
    """Asks for a thing of a look that several have, where none of them lies."""
    for look, relation, anchor in _pairings(generator, known):
        beside = known[anchor].right[0]
        if relation == "nearest" or beside in known[look].right:
            continue
        if all(
            descriptions.lies(things[number], relation, things[beside]) is False
            for number in known[look].right
        ):
            yield TextQuery(descriptions.beside(generator, look, relation, anchor), (), "absent")


def _pairings(
    generator: np.random.Generator, known: dict[Appearance, Fits]
) -> Iterator[tuple[Appearance, str, Appearance]]:
    """Yields looks that several things have, each with a relation and the look of a single thing to be beside."""
    looks = [
        look
        for look, held in known.items()
        if len(held.right) >= 2 and not held.vague and 1 <= _length(look) <= 3
    ]
    anchors = [
        look
        for look, held in known.items()
        if len(held.right) == 1 and not held.vague and _length(look) <= 3
    ]
    if not looks or not anchors:
        return
    for _ in range(RELATIONS_TRIED):
        relation = str(generator.choice(list(RELATIONS), p=RELATION_ODDS))
        yield (
            looks[int(generator.integers(len(looks)))],
            relation,
            anchors[int(generator.integers(len(anchors)))],
        )


def _look_of_none(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Fits]
) -> Iterator[TextQuery]:
    """Asks for a look that nothing has and that differs in one word from a single thing's; mostly a word that is true of another thing."""
    for look in _unique(generator, known):
        if _length(look) < 2:
            continue
        swaps, odds = [], []
        for side, word, words in zip(look._fields, look, WORDS, strict=True):
            for other in words if word is not None else ():
                swapped = look._replace(**{side: other})
                if other != word and fits(things, swapped) == Fits((), False):
                    swaps.append(swapped)
                    odds.append(3.0 if Appearance(**{side: other}) in known else 1.0)
        if swaps:
            swapped = swaps[int(generator.choice(len(swaps), p=np.array(odds) / sum(odds)))]
            yield TextQuery(descriptions.one(generator, swapped), (), "absent")
