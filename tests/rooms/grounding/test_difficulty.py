"""What is read from a query's words."""

import numpy as np
import pytest

from gigamask.grounding.difficulty import RELATIONS, complexity, difficulty, relations, words


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the red disc", 0),
        ("the disc left of the box", 1),
        ("the disc to the left of the box", 1),
        ("The disc, on top of the box.", 1),
        ("the cup on the table next to the window", 2),
        ("the man in front of the car behind the tree under the lamp", 3),
        ("the ring  between\nthe boxes", 1),
        ("a person in red", 0),
        ("an onion on the left", 1),
        ("overalls, beloved, nearly, underwear, Aboveground", 0),
        ("the dog at the bottom", 1),
        ("", 0),
    ],
)
def test_relations_are_whole_phrases_the_longest_first(text, number):
    assert relations(text) == number


def test_every_relation_counts_once():
    assert len(set(RELATIONS)) == len(RELATIONS)
    assert [each for each in RELATIONS if relations(f"the disc {each} the box") != 1] == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("zebra", 0),
        ("potted plant", 0),
        ("the red disc", 0),
        ("all striped objects", 0),
        ("the red striped disc", 1),
        ("a vase with flowers", 1),
        ("cats and dogs", 1),
        ("a stuffed teddy bear", 1),
        ("the disc left of the box", 2),
        ("the red striped disc with a hole above the box", 2),
    ],
)
def test_complexity_is_plain(text, kind):
    assert complexity(text) == kind


def test_words_are_counted_without_signs():
    assert words("The dog's T-shirt, 2 red_discs — and a hat!") == ["the", "dog's", "t-shirt", "2", "red", "discs", "and", "a", "hat"]


def test_difficulty_is_the_stated_sum():
    share, length, objects, count = np.array([1, 0, 0.5]), np.array([0, 50, 10]), np.array([0, 20, 5]), np.array([0, 5, 1])
    assert difficulty(share, length, objects, count) == pytest.approx([0, 1, 0.15 + 0.2 * 0.2 + 0.3 * 0.25 + 0.2 * 0.2])
    assert difficulty(share, 10 * length, 10 * objects, 10 * count)[1] == 1
    assert difficulty(share, length, objects, count).dtype == np.float32
