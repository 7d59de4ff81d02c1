"""Text queries about a described scene, each with the things it refers to.

Kinds and their maximum numbers per scene: attribute (one thing by its appearance, 4), relation (one
of several things of an appearance by its position relative to another, 3), several (all things of
an appearance, 2), absent (nothing: 1 appearance that differs in one word from one in the scene, and
1 relation that holds for none), size (the largest or smallest of an appearance, 1). Ambiguous
phrases, for which `descriptions.matches` or `satisfies` returns None, are not used.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from gigamask.synthetic import descriptions
from gigamask.synthetic.descriptions import EXTREMES, RELATIONS, WORDS, Appearance, Thing

KINDS = ("attribute", "relation", "several", "absent", "size")
ATTRIBUTE, RELATION, SEVERAL, ABSENT_LOOK, ABSENT_RELATION, SIZE = 4, 3, 2, 1, 1, 1
"""Queries of each kind, two of them absent."""
STATED = list(product((False, True), repeat=len(WORDS)))
"""Which properties a description states."""
LOOKS_TRIED, RELATIONS_TRIED = 20, 120
RELATION_ODDS = (0.2425, 0.2425, 0.2425, 0.2425, 0.03)
"""Lower for nearest, which is unambiguous more often than other relations."""


class TextQuery(NamedTuple):
    """A phrase, the numbers of the things it refers to, and its kind."""

    text: str
    targets: tuple[int, ...]
    kind: str


class Matches(NamedTuple):
    """The things that match a description, and whether others match ambiguously."""

    things: tuple[int, ...]
    ambiguous: bool


def make_queries(generator: np.random.Generator, things: Sequence[Thing]) -> list[TextQuery]:
    """Return queries about things, without duplicates.

    Args:
        generator: Random numbers.
        things: The things of a scene.
    """
    known = _looks(things)
    kinds = (
        (ATTRIBUTE, _by_look(generator, known)),
        (RELATION, _by_relation(generator, things, known)),
        (SEVERAL, _all_of(generator, known, len(things))),
        (ABSENT_LOOK, _look_of_none(generator, things, known)),
        (ABSENT_RELATION, _relation_of_none(generator, things, known)),
        (SIZE, _by_size(generator, things, known)),
    )
    queries: dict[str, TextQuery] = {}
    for count, candidates in kinds:
        limit = len(queries) + count
        for query in candidates:
            queries.setdefault(query.text, query)
            if len(queries) == limit:
                break
    return list(queries.values())


def _looks(things: Sequence[Thing]) -> dict[Appearance, Matches]:
    """Return all descriptions of the things, and the things that match each."""
    looks = {
        Appearance(
            *(word if state else None for word, state in zip(thing.look, stated, strict=True))
        ): None
        for thing in things
        for stated in STATED
    }
    return {look: find_matches(things, look) for look in looks}


def find_matches(things: Sequence[Thing], wanted: Appearance) -> Matches:
    """Return the things that match a description.

    Args:
        things: The things of a scene.
        wanted: The description.
    """
    results = [descriptions.matches(thing.look, wanted) for thing in things]
    return Matches(tuple(i for i, result in enumerate(results) if result), None in results)


def _length(look: Appearance) -> int:
    return sum(word is not None for word in look)


def _by_look(
    generator: np.random.Generator, known: dict[Appearance, Matches]
) -> Iterator[TextQuery]:
    """Yield queries for one thing each, by a description that only it matches."""
    for look in _unique(generator, known):
        yield TextQuery(descriptions.describe_one(generator, look), known[look].things, "attribute")


def _unique(
    generator: np.random.Generator, known: dict[Appearance, Matches]
) -> Iterator[Appearance]:
    """Yield for each thing a description that only it matches, usually a minimal one."""
    unique = {
        look: matches.things[0]
        for look, matches in known.items()
        if len(matches.things) == 1 and not matches.ambiguous
    }
    for number in generator.permutation(sorted(set(unique.values()))).tolist():
        looks = [look for look, thing in unique.items() if thing == number]
        odds = np.array([3.0 if _is_minimal(look, unique) else 1.0 for look in looks])
        yield looks[int(generator.choice(len(looks), p=odds / odds.sum()))]


def _is_minimal(look: Appearance, unique: dict[Appearance, int]) -> bool:
    return not any(
        word is not None and look._replace(**{side: None}) in unique
        for side, word in zip(look._fields, look, strict=True)
    )


def _all_of(
    generator: np.random.Generator, known: dict[Appearance, Matches], things: int
) -> Iterator[TextQuery]:
    """Yield queries for several but not all things, by descriptions of one to three words."""
    looks = [
        look
        for look, matches in known.items()
        if 2 <= len(matches.things) < things and not matches.ambiguous and 1 <= _length(look) <= 3
    ]
    for i in generator.permutation(len(looks)).tolist():
        targets = known[looks[i]].things
        text = descriptions.describe_all(generator, looks[i], pair=len(targets) == 2)
        yield TextQuery(text, targets, "several")


def _by_size(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Matches]
) -> Iterator[TextQuery]:
    """Yield queries for the largest or smallest thing of a description without size."""
    looks = [
        look
        for look, matches in known.items()
        if len(matches.things) >= 2 and look.size is None and _length(look) <= 2
    ]
    for i in generator.permutation(len(looks)).tolist()[:LOOKS_TRIED]:
        which = str(generator.choice(list(EXTREMES)))
        candidates = known[looks[i]].things
        found = descriptions.extreme([things[number] for number in candidates], which)
        if found is not None:
            text = descriptions.describe_one(generator, looks[i], which)
            yield TextQuery(text, (candidates[found],), "size")


def _by_relation(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Matches]
) -> Iterator[TextQuery]:
    """Yield queries for one of several matching things, by a relation that only it satisfies."""
    for look, relation, anchor in _pairings(generator, known):
        anchor_number = known[anchor].things[0]
        candidates = [number for number in known[look].things if number != anchor_number]
        if len(candidates) < 2:
            continue
        others = [things[number] for number in candidates]
        if relation == "nearest":
            found = descriptions.nearest(others, things[anchor_number])
        else:
            results = [
                descriptions.satisfies(thing, relation, things[anchor_number]) for thing in others
            ]
            unique = results.count(True) == 1 and None not in results
            found = results.index(True) if unique else None
        if found is not None:
            text = descriptions.describe_relation(generator, look, relation, anchor)
            yield TextQuery(text, (candidates[found],), "relation")


def _relation_of_none(
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Matches]
) -> Iterator[TextQuery]:
    """Yield queries with a relation that none of the matching things satisfies."""
    for look, relation, anchor in _pairings(generator, known):
        anchor_number = known[anchor].things[0]
        if relation == "nearest" or anchor_number in known[look].things:
            continue
        if all(
            descriptions.satisfies(things[number], relation, things[anchor_number]) is False
            for number in known[look].things
        ):
            text = descriptions.describe_relation(generator, look, relation, anchor)
            yield TextQuery(text, (), "absent")


def _pairings(
    generator: np.random.Generator, known: dict[Appearance, Matches]
) -> Iterator[tuple[Appearance, str, Appearance]]:
    """Yield triples: description of several things, relation, and description of one thing."""
    looks = [
        look
        for look, matches in known.items()
        if len(matches.things) >= 2 and not matches.ambiguous and 1 <= _length(look) <= 3
    ]
    anchors = [
        look
        for look, matches in known.items()
        if len(matches.things) == 1 and not matches.ambiguous and _length(look) <= 3
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
    generator: np.random.Generator, things: Sequence[Thing], known: dict[Appearance, Matches]
) -> Iterator[TextQuery]:
    """Yield queries that match nothing and differ in one word from a thing's description.

    The word is usually one that matches another thing.
    """
    for look in _unique(generator, known):
        if _length(look) < 2:
            continue
        swaps, odds = [], []
        for side, word, words in zip(look._fields, look, WORDS, strict=True):
            for other in words if word is not None else ():
                swapped = look._replace(**{side: other})
                if other != word and find_matches(things, swapped) == Matches((), False):
                    swaps.append(swapped)
                    odds.append(3.0 if Appearance(**{side: other}) in known else 1.0)
        if swaps:
            swapped = swaps[int(generator.choice(len(swaps), p=np.array(odds) / sum(odds)))]
            yield TextQuery(descriptions.describe_one(generator, swapped), (), "absent")
