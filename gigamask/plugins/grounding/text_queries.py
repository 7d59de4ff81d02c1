"""Text queries about a described scene, each with the objects it refers to.

Kinds and their maximum numbers per scene: attribute (one object by its appearance, 4), relation
(one of several objects of an appearance by its position relative to another, 3), several (all
objects of an appearance, 2), absent (nothing: 1 appearance that differs in one word from one in the
scene, and 1 relation that holds for none), size (the largest or smallest of an appearance, 1).
Ambiguous phrases, for which `descriptions.matches` or `satisfies` returns None, are not used.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from gigamask.plugins.grounding import descriptions
from gigamask.plugins.grounding.descriptions import (
    EXTREMES,
    RELATIONS,
    WORDS,
    Appearance,
    SceneObject,
)

KINDS = ("attribute", "relation", "several", "absent", "size")
ATTRIBUTE, RELATION, SEVERAL, ABSENT_APPEARANCE, ABSENT_RELATION, SIZE = 4, 3, 2, 1, 1, 1
"""Queries of each kind, two of them absent."""
STATED = list(product((False, True), repeat=len(WORDS)))
"""Which properties a description states."""
APPEARANCES_TRIED, RELATIONS_TRIED = 20, 120
RELATION_ODDS = (0.2425, 0.2425, 0.2425, 0.2425, 0.03)
"""Lower for nearest, which is unambiguous more often than other relations."""


class TextQuery(NamedTuple):
    """A phrase, the numbers of the objects it refers to, and its kind."""

    text: str
    targets: tuple[int, ...]
    kind: str


class Matches(NamedTuple):
    """The objects that match a description, and whether others match ambiguously."""

    objects: tuple[int, ...]
    ambiguous: bool


Known = dict[Appearance, Matches]


def make_queries(generator: Generator, objects: Sequence[SceneObject]) -> list[TextQuery]:
    """Return queries about objects, without duplicates.

    Args:
        generator: Random numbers.
        objects: The objects of a scene.
    """
    known = _appearances(objects)
    kinds = (
        (ATTRIBUTE, _by_appearance(generator, known)),
        (RELATION, _by_relation(generator, objects, known)),
        (SEVERAL, _all_of(generator, known, len(objects))),
        (ABSENT_APPEARANCE, _absent_appearance(generator, objects, known)),
        (ABSENT_RELATION, _absent_relation(generator, objects, known)),
        (SIZE, _by_size(generator, objects, known)),
    )
    queries: dict[str, TextQuery] = {}
    for count, candidates in kinds:
        limit = len(queries) + count
        for query in candidates:
            queries.setdefault(query.text, query)
            if len(queries) == limit:
                break
    return list(queries.values())


def _appearances(objects: Sequence[SceneObject]) -> Known:
    """Return all descriptions of the objects, and the objects that match each."""
    appearances = {
        Appearance(
            *(
                word if state else None
                for word, state in zip(candidate.appearance, stated, strict=True)
            )
        ): None
        for candidate in objects
        for stated in STATED
    }
    return {appearance: find_matches(objects, appearance) for appearance in appearances}


def find_matches(objects: Sequence[SceneObject], wanted: Appearance) -> Matches:
    """Return the objects that match a description.

    Args:
        objects: The objects of a scene.
        wanted: The description.
    """
    results = [descriptions.matches(candidate.appearance, wanted) for candidate in objects]
    return Matches(tuple(i for i, result in enumerate(results) if result), None in results)


def _length(appearance: Appearance) -> int:
    return sum(word is not None for word in appearance)


def _by_appearance(generator: Generator, known: Known) -> Iterator[TextQuery]:
    """Yield queries for one object each, by a description that only it matches."""
    for appearance in _unique(generator, known):
        yield TextQuery(
            descriptions.describe_one(generator, appearance), known[appearance].objects, "attribute"
        )


def _unique(generator: Generator, known: Known) -> Iterator[Appearance]:
    """Yield for each object a description that only it matches, usually a minimal one."""
    unique = {
        appearance: matches.objects[0]
        for appearance, matches in known.items()
        if len(matches.objects) == 1 and not matches.ambiguous
    }
    for number in generator.permutation(sorted(set(unique.values()))).tolist():
        appearances = [appearance for appearance, index in unique.items() if index == number]
        odds = np.array(
            [3.0 if _is_minimal(appearance, unique) else 1.0 for appearance in appearances]
        )
        yield appearances[int(generator.choice(len(appearances), p=odds / odds.sum()))]


def _is_minimal(appearance: Appearance, unique: dict[Appearance, int]) -> bool:
    return not any(
        word is not None and appearance._replace(**{side: None}) in unique
        for side, word in zip(appearance._fields, appearance, strict=True)
    )


def _all_of(generator: Generator, known: Known, count: int) -> Iterator[TextQuery]:
    """Yield queries for several but not all objects, by descriptions of one to three words."""
    appearances = [
        appearance
        for appearance, matches in known.items()
        if 2 <= len(matches.objects) < count
        and not matches.ambiguous
        and 1 <= _length(appearance) <= 3
    ]
    for i in generator.permutation(len(appearances)).tolist():
        targets = known[appearances[i]].objects
        text = descriptions.describe_all(generator, appearances[i], pair=len(targets) == 2)
        yield TextQuery(text, targets, "several")


def _by_size(
    generator: Generator, objects: Sequence[SceneObject], known: Known
) -> Iterator[TextQuery]:
    """Yield queries for the largest or smallest object of a description without size."""
    appearances = [
        appearance
        for appearance, matches in known.items()
        if len(matches.objects) >= 2 and appearance.size is None and _length(appearance) <= 2
    ]
    for i in generator.permutation(len(appearances)).tolist()[:APPEARANCES_TRIED]:
        which = str(generator.choice(list(EXTREMES)))
        candidates = known[appearances[i]].objects
        found = descriptions.extreme([objects[number] for number in candidates], which)
        if found is not None:
            text = descriptions.describe_one(generator, appearances[i], which)
            yield TextQuery(text, (candidates[found],), "size")


def _by_relation(
    generator: Generator, objects: Sequence[SceneObject], known: Known
) -> Iterator[TextQuery]:
    """Yield queries for one of several matching objects, by a relation that only it satisfies."""
    for appearance, relation, anchor in _pairings(generator, known):
        anchor_number = known[anchor].objects[0]
        candidates = [number for number in known[appearance].objects if number != anchor_number]
        if len(candidates) < 2:
            continue
        others = [objects[number] for number in candidates]
        if relation == "nearest":
            found = descriptions.nearest(others, objects[anchor_number])
        else:
            results = [
                descriptions.satisfies(candidate, relation, objects[anchor_number])
                for candidate in others
            ]
            unique = results.count(True) == 1 and None not in results
            found = results.index(True) if unique else None
        if found is not None:
            text = descriptions.describe_relation(generator, appearance, relation, anchor)
            yield TextQuery(text, (candidates[found],), "relation")


def _absent_relation(
    generator: Generator, objects: Sequence[SceneObject], known: Known
) -> Iterator[TextQuery]:
    """Yield queries with a relation that none of the matching objects satisfies."""
    for appearance, relation, anchor in _pairings(generator, known):
        anchor_number = known[anchor].objects[0]
        if relation == "nearest" or anchor_number in known[appearance].objects:
            continue
        if all(
            descriptions.satisfies(objects[number], relation, objects[anchor_number]) is False
            for number in known[appearance].objects
        ):
            text = descriptions.describe_relation(generator, appearance, relation, anchor)
            yield TextQuery(text, (), "absent")


def _pairings(generator: Generator, known: Known) -> Iterator[tuple[Appearance, str, Appearance]]:
    """Yield triples: description of several objects, relation, and description of one object."""
    appearances = [
        appearance
        for appearance, matches in known.items()
        if len(matches.objects) >= 2 and not matches.ambiguous and 1 <= _length(appearance) <= 3
    ]
    anchors = [
        appearance
        for appearance, matches in known.items()
        if len(matches.objects) == 1 and not matches.ambiguous and _length(appearance) <= 3
    ]
    if not appearances or not anchors:
        return
    for _ in range(RELATIONS_TRIED):
        relation = str(generator.choice(list(RELATIONS), p=RELATION_ODDS))
        yield (
            appearances[int(generator.integers(len(appearances)))],
            relation,
            anchors[int(generator.integers(len(anchors)))],
        )


def _absent_appearance(
    generator: Generator, objects: Sequence[SceneObject], known: Known
) -> Iterator[TextQuery]:
    """Yield queries that match nothing and differ in one word from an object's description.

    The word is usually one that matches another object.
    """
    for appearance in _unique(generator, known):
        if _length(appearance) < 2:
            continue
        swaps, odds = [], []
        for side, word, words in zip(appearance._fields, appearance, WORDS, strict=True):
            for other in words if word is not None else ():
                swapped = appearance._replace(**{side: other})
                if other != word and find_matches(objects, swapped) == Matches((), False):
                    swaps.append(swapped)
                    odds.append(3.0 if Appearance(**{side: other}) in known else 1.0)
        if swaps:
            swapped = swaps[int(generator.choice(len(swaps), p=np.array(odds) / sum(odds)))]
            yield TextQuery(descriptions.describe_one(generator, swapped), (), "absent")
