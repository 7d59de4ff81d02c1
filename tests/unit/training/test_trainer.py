"""Signals while a training runs."""

import ctypes
import os
import signal
import sys
import threading

import pytest

from gigamask.training.trainer import stop_signal


class Pipe:
    """Standard error that can be waited for."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def write(self, text: str) -> None:
        os.write(self.writer, text.encode())

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_is_acknowledged_while_a_step_takes_long(monkeypatch, number):
    """The step is a call that returns only once the line is printed; no handler runs meanwhile."""
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    handler, letter = signal.getsignal(number), ctypes.create_string_buffer(1)
    late = threading.Timer(60, pipe.write, ("late",))
    late.start()
    with stop_signal() as requested:
        signal.siginterrupt(number, False)
        assert not requested()
        threading.Thread(target=os.kill, args=(os.getpid(), number)).start()
        ctypes.CDLL(None).read(pipe.reader, letter, 1)
        late.cancel()
        assert requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == handler
    line = letter.value + os.read(pipe.reader, 200)
    assert line.startswith(signal.Signals(number).name.encode() + b": finishing this step")
    assert line.count(b"\n") == 1


def test_other_processes_print_nothing(capfd):
    with stop_signal(verbose=False) as requested:
        signal.raise_signal(signal.SIGTERM)
        assert requested()
    assert capfd.readouterr().err == ""


def test_in_another_thread_signals_are_left_alone():
    handler, found = signal.getsignal(signal.SIGTERM), []

    def look() -> None:
        with stop_signal() as requested:
            found.append((requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [(False, handler)]
