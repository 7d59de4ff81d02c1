"""Signals that stop a process, those that do not, and outputs that have closed."""

import os
import signal
import types

import pytest

from gigamask.signals import STOP_SIGNALS, discard_if_closed, stop_signals_handled


@pytest.fixture
def usr1():
    before = signal.getsignal(signal.SIGUSR1)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_batch_systems_and_terminals_stop_a_process():
    received = []
    with stop_signals_handled(lambda number, frame: received.append(number)) as handled:
        for number in sorted(handled):
            signal.raise_signal(number)
    assert received == sorted(handled)
    names = {number.name for number in STOP_SIGNALS}
    assert names == {"SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(number):
    """As under nohup, and in the background of a script."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stop_signals_handled(pytest.fail) as handled:
            signal.raise_signal(number)
            assert number not in handled
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_program_keeps_the_signals_that_it_handles_itself(usr1):
    """As submitit does; but ours, which the command line has set, is replaced for a training."""
    received = []
    signal.signal(usr1, lambda number, frame: received.append("program"))
    with stop_signals_handled(pytest.fail):
        signal.raise_signal(usr1)
    own = types.FunctionType((lambda number, frame: None).__code__, {"__name__": "gigamask.cli"})
    signal.signal(usr1, own)
    with stop_signals_handled(lambda number, frame: received.append("gigamask")):
        signal.raise_signal(usr1)
    assert received == ["program", "gigamask"]
    assert signal.getsignal(usr1) == own


def test_what_is_written_to_a_closed_output_is_discarded(tmp_path):
    reader, writer = os.pipe()
    with open(writer, "w") as stream, open(tmp_path / "log", "w") as log:
        assert not discard_if_closed(stream)
        os.close(reader)
        assert discard_if_closed(stream)
        stream.write("nobody reads this")
        stream.flush()
        assert not discard_if_closed(stream)
        assert not discard_if_closed(log)
