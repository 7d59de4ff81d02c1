"""What phrases mean, and their words."""

import itertools

import numpy as np
import pytest

from gigamask.plugins.grounding import descriptions
from gigamask.plugins.grounding.descriptions import (
    ANYTHING,
    RELATIONS,
    SUFFIXES,
    SYNONYMS,
    WORDS,
    Appearance,
    SceneObject,
    extreme,
    matches,
    nearest,
    satisfies,
)


def thing(x, y, half=10.0, area=None):
    return SceneObject(
        Appearance(),
        (x - half, y - half, x + half, y + half),
        (float(x), float(y)),
        float(area or 4 * half * half),
    )


DISC = Appearance("small", "red", "striped", "disc")


@pytest.mark.parametrize(
    "look, wanted, true",
    [
        (DISC, DISC, True),
        (DISC, Appearance(color="red", shape="disc"), True),
        (DISC, Appearance(color="red", shape="box"), False),
        (DISC, Appearance(size="large"), False),
        (DISC._replace(size=None), Appearance(size="large", shape="disc"), None),
        (DISC._replace(size=None), Appearance(size="large", shape="box"), False),
        (DISC._replace(color="white"), Appearance(color="grey", shape="disc"), None),
        (DISC._replace(color="white"), Appearance(color="grey", shape="box"), False),
        (DISC._replace(color="white", pattern="plain"), Appearance(color="grey"), False),
        (DISC._replace(color="white"), Appearance(color="white"), True),
    ],
)
def test_a_look_meets_what_is_wanted_of_it(look, wanted, true):
    assert matches(look, wanted) is true


@pytest.mark.parametrize(
    "x, y, left, right, above, below",
    [
        (50, 100, True, False, False, False),
        (50, 80, True, False, None, False),
        (79, 100, True, False, False, False),
        (70, 60, None, False, True, False),
        (100, 60, False, False, True, False),
        (140, 140, False, True, False, True),
        (150, 101, False, True, False, None),
        (100, 150, False, False, False, True),
    ],
)
def test_places_are_plain_or_left_open(x, y, left, right, above, below):
    found = [
        satisfies(thing(x, y), relation, thing(100, 100))
        for relation in ("left", "right", "above", "below")
    ]
    assert found == [left, right, above, below]


def test_the_nearest_is_so_by_far():
    anchor = thing(100, 100)
    assert nearest([thing(200, 100), thing(100, 60)], anchor) == 1
    assert nearest([thing(150, 100), thing(100, 60)], anchor) is None
    # The middle of a large thing is farther away than its border.
    assert nearest([thing(170, 100, half=55.0), thing(100, 60)], anchor) is None


def test_the_largest_is_so_by_far_also_in_its_length():
    assert extreme([thing(0, 0), thing(0, 0, 20.0), thing(0, 0, 11.0)], "largest") == 1
    assert extreme([thing(0, 0), thing(0, 0, 20.0), thing(0, 0, 11.0)], "smallest") is None
    assert extreme([thing(0, 0, 20.0), thing(0, 0, 8.0), thing(0, 0, 11.0)], "smallest") == 1
    assert extreme([thing(0, 0, 30.0, area=400), thing(0, 0, 20.0)], "largest") is None


def test_phrases_say_what_is_wanted_in_varied_words():
    generator = np.random.default_rng(0)
    for look in itertools.product(*[(None, *words) for words in WORDS]):
        wanted = Appearance(*look)
        told = descriptions.describe_one(generator, wanted)
        assert read(told) == (wanted, False), told
        told = descriptions.describe_all(generator, wanted)
        assert read(told)[0] == wanted, told
        assert read(told)[1] == ("every" not in told)
    said = {descriptions.describe_one(generator, DISC) for _ in range(200)}
    assert {
        "the small red striped disc",
        "small striped red circle",
        "the small red circle with stripes",
    } < said
    assert len(said) == 12
    said = {
        descriptions.describe_all(generator, Appearance(shape="box"), pair=True) for _ in range(200)
    }
    assert {
        "all boxes",
        "both squares",
        "every box",
        "the boxes",
        "all the squares",
        "boxes",
    } < said
    said = {
        descriptions.describe_relation(
            generator, Appearance(shape="cross"), "below", Appearance(color="red")
        )
        for _ in range(200)
    }
    assert {"the cross below the red thing", "cross under the red object"} < said
    assert (
        descriptions.describe_one(generator, Appearance(shape="ring"), "smallest")
        == "the smallest ring"
    )


def read(phrase: str) -> tuple[Appearance, bool]:
    """Returns the look that a phrase for one or several things states, read by a few rules of its
    own, and whether it is in the plural."""
    for pattern, suffix in SUFFIXES.items():
        phrase = phrase.replace(suffix, pattern)
    known = {word: name for name, words in SYNONYMS.items() for word in words}
    found, plural = {}, False
    for word in phrase.split():
        single = (
            word
            if word in ("cross", "thing") or not word.endswith("s")
            else word[:-2]
            if word in ("boxes", "crosses")
            else word[:-1]
        )
        plural |= single != word
        name = known.get(single, single)
        sides = [
            side for side, words in zip(Appearance._fields, WORDS, strict=True) if name in words
        ]
        if sides:
            assert sides[0] not in found, phrase
            found[sides[0]] = name
        else:
            assert name in ("the", "all", "every", "both", *ANYTHING), phrase
    return Appearance(**found), plural


def test_the_words_of_places_are_relations():
    from gigamask.plugins.grounding.data import count_relations

    assert [count_relations(way) for ways in RELATIONS.values() for way in ways] == [1] * 9
