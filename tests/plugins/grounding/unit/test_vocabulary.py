"""Words of queries, nonsense, and the words a run was trained on."""

import pytest

from gigamask.errors import GigamaskError
from gigamask.plugins.grounding import vocabulary
from gigamask.plugins.grounding.queries import Query
from gigamask.plugins.grounding.vocabulary import (
    STOP_WORDS,
    check_text,
    describe_unknown,
    distinct_words,
    nonsense_queries,
    words,
)
from tests.errors import error_line

QUERY = Query("a.tar", "sa_1", "the red disc left of the box", (2,), "relation", "kitchen")


@pytest.mark.parametrize("text", ["", "  ", "-_-", "¿?", "12 + 3"])
def test_a_text_without_letters_is_refused(text):
    with pytest.raises(GigamaskError) as raised:
        check_text(text)
    assert repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["a", "7 dogs", "Äpfel", "赤い箱", "¿dónde?"])
def test_a_text_with_letters_is_taken(text):
    check_text(text)


def test_nonsense_has_no_known_word_and_no_target():
    known = frozenset(("red", "disc", "box", *STOP_WORDS))
    made = nonsense_queries([QUERY] * 300, known, 3, "test")
    assert made == nonsense_queries([QUERY] * 300, known, 3, "test")
    assert {(each.image, each.tar, each.domain) for each in made} == {("sa_1", "a.tar", "kitchen")}
    assert {(each.kind, each.mask_indices) for each in made} == {("nonsense", ())}
    assert len({each.text for each in made}) > 290
    split = [words(each.text) for each in made]
    assert {len(each) for each in split} == set(range(1, 8))
    assert all(set(each) - STOP_WORDS for each in split), "a word of random letters at least"
    assert all(set(each) & known <= STOP_WORDS for each in split)
    with_stop_words = [bool(set(each) & STOP_WORDS) for each in split]
    assert any(with_stop_words)
    assert not all(with_stop_words)


def test_nonsense_is_never_longer_than_a_query_may_be():
    [made] = nonsense_queries([Query(None, "sa_1", "a b " * 250, ())], (), 0, "test")
    assert len(made.text) < 300
    [made] = nonsense_queries([Query(None, "sa_1", "!!!", ())], (), 0, "test")
    assert words(made.text)


def test_unknown_words_are_named():
    known = distinct_words(["the red disc", "left of the box"])
    assert describe_unknown("the Red box", known) == ""
    assert describe_unknown("red zxqv", known) == "not in the training queries: zxqv"
    none = "no word of it is in the training queries: "
    assert describe_unknown("zxqv blorp 7", known) == f"{none}zxqv, blorp, 7"
    assert describe_unknown("the zxqv zxqv", known) == f"{none}zxqv", "stop words do not count"
    assert describe_unknown("this", known) == f"{none}this", "unless there are no others"


def test_the_words_of_a_run_come_back_from_its_folder(tmp_path):
    assert vocabulary.load(str(tmp_path)) is None
    known = distinct_words(["the red disc", "Äpfel"])
    path = tmp_path / vocabulary.FILE
    path.write_text(vocabulary.to_json(known))
    assert vocabulary.load(str(tmp_path)) == known
    for damaged in (b'["red', b"[3]", b"3", b"\xff"):
        path.write_bytes(damaged)
        with error_line(r"words.json: "):
            vocabulary.load(str(tmp_path))
