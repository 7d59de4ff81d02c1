import pickle

from gigamask.errors import CorruptSampleError


def test_a_message_is_one_printable_line_whatever_names_hold():
    fault = CorruptSampleError("sa\n_1\udc80.jpg: größer als 1")
    assert str(fault) == r"sa\n_1\udc80.jpg: größer als 1"
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)
