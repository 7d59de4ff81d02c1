import pickle

from gigamask.faults import BadSample


def test_a_message_is_one_printable_line_whatever_names_hold():
    fault = BadSample("sa\n_1\udc80.jpg: größer als 1")
    assert str(fault) == r"sa\n_1\udc80.jpg: größer als 1"
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)
