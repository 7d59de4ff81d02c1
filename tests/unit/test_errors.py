import pickle

from gigamask.errors import CorruptSampleError, counted


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
