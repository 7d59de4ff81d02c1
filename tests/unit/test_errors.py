import pickle

from gigamask.errors import CorruptSampleError, abridged, counted, score_text


def test_a_message_is_one_printable_line_whatever_names_hold():
    fault = CorruptSampleError("sa\n_1\udc80.jpg: größer als 1")
    assert str(fault) == r"sa\n_1\udc80.jpg: größer als 1"
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)


def test_thousands_of_paths_are_one_line_of_160_characters():
    assert abridged(["a.tar", "b\n.tar"]) == r"a.tar b\n.tar"
    many = abridged(f"sa_{number:06}.tar" for number in range(3000))
    assert len(many) == 160
    assert many.endswith(" ...")


def test_counts_agree_with_their_nouns():
    assert [counted(number, "tar") for number in (0, 1, 2, 1000)] == [
        "0 tars",
        "1 tar",
        "2 tars",
        "1,000 tars",
    ]


def test_scores_have_three_digits_and_the_error_if_it_is_known():
    assert score_text(0.5) == "0.500"
    assert score_text(0.0, 0.01234) == "0.000 ± 0.012"
    assert score_text(None, 0.1) == ""
