"""What holds for every describable scene: objects look as they are described, and queries about
them are true.
"""

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.plugins.grounding.described_scenes import COLORS, DescribedScene, compose_scene
from gigamask.plugins.grounding.descriptions import EXTREMES, RELATIONS, Appearance, SceneObject
from gigamask.plugins.grounding.text_queries import KINDS, make_queries
from tests.plugins.grounding.unit.test_descriptions import read

SCENES = 40


@cache
def scenes() -> list[DescribedScene]:
    return [compose_scene(0, number) for number in range(SCENES)]


def test_scenes_hold_whole_things_that_can_be_seen():
    counts = [len(each.objects) for each in scenes()]
    assert min(counts) >= 8
    assert max(counts) == 14
    pairs = 0
    for each in scenes():
        masks = each.scene.masks
        assert len(masks) - len(each.objects) in (0, 1)
        assert set(each.masks.tolist()) <= set(range(len(masks)))
        shares = masks.areas() / np.prod(masks.size)
        assert shares.min() > 0.006
        height, width = masks.size
        boxes = masks.boxes()[each.masks]
        assert (boxes[:, :2] > 0).all()
        assert (boxes[:, 2:] < (width - 1, height - 1)).all()
        assert [list(thing.box) for thing in each.objects] == boxes.tolist()
        assert [thing.area for thing in each.objects] == masks.areas()[each.masks].tolist()
        shared = masks.intersections(masks)[np.ix_(each.masks, each.masks)]
        assert (shared == np.diag(np.diag(shared))).all()
        if len(masks) > len(each.objects):
            pairs += 1
            other = ({*range(len(masks))} - {*each.masks.tolist()}).pop()
            assert (masks.intersections(masks)[other, each.masks] > 0).sum() == 2
    assert pairs >= 5


def test_sizes_are_clearly_apart():
    """Even a large triangle has more pixels than a medium disc, and a medium one more than a small
    disc, in the same picture."""
    for each in scenes():
        for shape in ("disc", "box", "star", "ring", "triangle", "cross"):
            areas = {
                size: [
                    thing.area
                    for thing in each.objects
                    if thing.appearance[0] == size and thing.appearance.shape == shape
                ]
                for size in ("small", None, "large")
            }
            assert max(areas["small"], default=0) * 1.15 < min(areas[None], default=np.inf)
            assert max(areas[None], default=0) * 1.15 < min(areas["large"], default=np.inf)
            assert max(areas["small"], default=0) * 2 < min(areas["large"], default=np.inf)


def test_colours_are_what_they_are_called():
    """The median of a plain thing's pixels is nearer to its name's color than to any other's, and
    unlike the ground."""
    names = list(COLORS)
    wrong, total = [], 0
    for number, each in enumerate(scenes()):
        pixels, dense = each.scene.pixels.astype(float), each.scene.masks.to_dense()
        ground = np.median(pixels[~dense.any(0)], axis=0)
        for thing, mask in zip(each.objects, each.masks, strict=True):
            if thing.appearance.pattern == "plain":
                found = np.median(pixels[dense[mask]], axis=0)
                total += 1
                far = np.linalg.norm(np.array(list(COLORS.values())) - found, axis=1)
                if names[int(far.argmin())] != thing.appearance.color:
                    wrong.append((number, thing.appearance))
                assert np.linalg.norm(found - ground) > 50
    assert total > 120
    assert wrong == []


def test_patterns_can_be_seen():
    spreads = {"plain": [], "striped": [], "dotted": [], "checked": []}
    for each in scenes():
        pixels, dense = each.scene.pixels.astype(float).sum(2), each.scene.masks.to_dense()
        for thing, mask in zip(each.objects, each.masks, strict=True):
            spreads[thing.appearance.pattern].append(pixels[dense[mask]].std())
    plain = np.quantile(spreads.pop("plain"), 0.95)
    assert all(np.quantile(found, 0.05) > 1.5 * plain for found in spreads.values())


def true_of(thing: SceneObject, wanted: Appearance) -> bool:
    return all(
        word is None or word == has for word, has in zip(wanted, thing.appearance, strict=True)
    )


def answers(text: str, things: list[SceneObject]) -> set[int]:
    """Works out which things a phrase means, by rules of its own: middles instead of boxes, words
    instead of looks."""
    for relation, ways in RELATIONS.items():
        for way in sorted(ways, key=len, reverse=True):
            if f" {way} " in text:
                wanted, anchor = (read(part)[0] for part in text.split(f" {way} "))
                [beside] = [thing for thing in things if true_of(thing, anchor)]
                middles = {
                    number: np.subtract(thing.center_xy, beside.center_xy)
                    for number, thing in enumerate(things)
                    if true_of(thing, wanted) and thing is not beside
                }
                if relation == "nearest":
                    return {min(middles, key=lambda number: np.hypot(*middles[number]))}
                way = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}[
                    relation
                ]
                return {number for number, xy in middles.items() if np.dot(way, xy) > 0}
    for rank, ways in EXTREMES.items():
        found = re.match(rf"the (?:{'|'.join(ways)}) (.*)", text)
        if found:
            there = [
                number for number, thing in enumerate(things) if true_of(thing, read(found[1])[0])
            ]
            return {
                (max if rank == "largest" else min)(there, key=lambda number: things[number].area)
            }
    return {number for number, thing in enumerate(things) if true_of(thing, read(text)[0])}


def check_questions(things: list[SceneObject], asked) -> None:
    assert len({question.text for question in asked}) == len(asked)
    for text, right, kind in asked:
        assert answers(text, things) == set(right), (text, right)
        assert (kind == "absent") == (not right), text
        assert (kind == "several") == (len(right) > 1), text


def test_every_query_targets_what_was_drawn():
    for each in scenes():
        check_questions(each.objects, each.queries)
    kinds = Counter(question.kind for each in scenes() for question in each.queries)
    assert tuple(kinds) == KINDS
    assert [kinds[kind] / SCENES for kind in KINDS] == pytest.approx([4, 3, 2, 2, 1], abs=0.1)


def test_questions_are_not_plain_from_less():
    """Queries name positions where the appearance alone is ambiguous, and absent objects differ in
    one word from present ones."""
    for each in scenes():
        for text, _, kind in each.queries:
            cut = re.split(" (?:to the )?(?:left|right|above|below|under|nearest|closest) ", text)
            if len(cut) == 2:
                assert sum(true_of(thing, read(cut[0])[0]) for thing in each.objects) >= 2
            elif kind == "absent":
                wanted = read(text)[0]
                fewer = [
                    wanted._replace(**{side: None})
                    for side, word in zip(Appearance._fields, wanted, strict=True)
                    if word
                ]
                assert any(any(true_of(thing, look) for thing in each.objects) for look in fewer)


LOOKS = st.builds(
    Appearance,
    st.sampled_from(["small", None, "large"]),
    *[
        st.sampled_from(each)
        for each in (["red", "white", "grey"], ["plain", "striped"], ["disc", "box"])
    ],
)


@given(
    st.lists(
        st.tuples(LOOKS, st.integers(0, 9), st.integers(0, 9), st.integers(3, 30)),
        max_size=9,
        unique_by=lambda each: each[1:3],
    ),
    st.integers(0, 9),
)
@settings(max_examples=60)
def test_queries_are_true_for_any_scene(given, seed):
    things = [
        SceneObject(
            look,
            (40.0 * x - half, 40.0 * y - half, 40.0 * x + half, 40.0 * y + half),
            (40.0 * x, 40.0 * y),
            4.0 * half * half,
        )
        for look, x, y, half in given
    ]
    check_questions(things, make_queries(np.random.default_rng(seed), things))
