"""Names are the same if they look the same, and no file is paired twice."""

import unicodedata
from pathlib import Path

import pytest

from gigamask.datatools.pairing import names_within, pair_names

COMPOSED = unicodedata.normalize("NFC", "Fähre_한.jpg")
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


def test_bytes_come_before_composed_forms():
    assert pair_names([[COMPOSED], [DECOMPOSED]], [DECOMPOSED, COMPOSED]) == [1, 0]
    assert pair_names([[COMPOSED]], [DECOMPOSED]) == [0]
    assert pair_names([[DECOMPOSED]], [COMPOSED]) == [0]


def test_other_cases_of_letters_come_last():
    assert pair_names([["0.JPG"], ["1.jpg"]], ["0.jpg", "1.JPG"]) == [0, 1]
    assert pair_names([["a/X.jpg", "X.jpg"]], ["A/x.jpg", "X.jpg"]) == [1]
    assert pair_names([["x.JPG"], ["x.jpg"]], ["x.jpg"])[1] == 0
    assert pair_names([["X.jpg"]], ["x.jpg", "x.JPG"]) == ["2 files have its name"]


def test_no_file_is_paired_twice():
    first, second = pair_names([[DECOMPOSED], [COMPOSED]], [COMPOSED])
    assert second == 0
    assert "2 names mean" in str(first)
    both = pair_names([["a/x.jpg", "x.jpg"], ["b/x.jpg", "x.jpg"]], ["x.jpg"])
    assert all("2 names mean x.jpg" in str(each) for each in both)
    assert pair_names([["x.jpg"]], ["x.jpg", "x.jpg"]) == ["2 files have its name"]
    assert pair_names([["x.jpg"], ["x.jpg"]], ["x.jpg"], can_repeat=True) == [0, 0]
    assert pair_names([["y.jpg"]], ["x.jpg"]) == ["no file has its name"]


def test_the_own_stem_decides_between_equal_claims():
    copy, original = pair_names([["x.jpg"], ["x.jpg"]], ["x.jpg"], ["x copy", "x"])
    assert original == 0
    assert "2 names mean x.jpg" in str(copy)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("x.jpg", ["x.jpg"]),
        ("a/x.jpg", ["a/x.jpg", "x.jpg"]),
        ("a\\x.jpg", ["a\\x.jpg", "a/x.jpg", "x.jpg"]),
        ("..\\images\\x.jpg", ["..\\images\\x.jpg", "images/x.jpg", "x.jpg"]),
        ("C:\\me\\x.jpg", ["C:\\me\\x.jpg", "me/x.jpg", "x.jpg"]),
        ("/photos/a/x.jpg", ["a/x.jpg", "x.jpg"]),
        ("/else/x.jpg", ["else/x.jpg", "x.jpg"]),
        ("../../etc/x.jpg", ["etc/x.jpg", "x.jpg"]),
        ("", []),
        ("..", []),
        ("x\0.jpg", []),
    ],
)
def test_what_a_name_may_mean_below_a_folder(name, expected):
    assert names_within(name, Path("/photos")) == expected


def test_a_name_relative_to_a_subfolder():
    assert names_within("x.jpg", Path("/photos"), "a") == ["a/x.jpg", "x.jpg"]
