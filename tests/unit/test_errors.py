import pickle

from gigamask.errors import CorruptSampleError, counted, score_text


def test_a_message_is_one_printable_line_whatever_names_hold():
    fault = CorruptSampleError("sa\n_1\udc80.jpg: größer als 1")
    assert str(fault) == r"sa\n_1\udc80.jpg: größer als 1"
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)


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
