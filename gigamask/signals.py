"""Signals that ask a process to stop, and outputs that have closed, as with their terminal."""

import os
import select
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = tuple(
    signal.Signals[name]
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if name in signal.Signals.__members__
)
"""Ctrl-C, batch systems, closed terminals, and the warning that batch scripts ask for before their
time is over. Windows has the first two only."""


@contextmanager
def stop_signals_handled(
    handle: Callable[..., object], numbers: Collection[int] = STOP_SIGNALS
) -> Iterator[frozenset[int]]:
    """Handle stop signals, none outside of the main thread, where Python cannot.

    One that is ignored stays ignored, as SIGHUP under `nohup`. SIGHUP, SIGUSR1 and SIGUSR2 stay
    with a program that calls gigamask and handles them itself.

    Args:
        handle: Called with the number of a signal, and with the signals that are handled.
        numbers: The signals.

    Yields:
        The signals that are handled.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {n: signal.getsignal(n) for n in numbers if is_main and not _is_kept(n)}
    handled = frozenset(before)
    for number in handled:
        signal.signal(number, lambda number, _: handle(number, handled))
    try:
        yield handled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_kept(number: int) -> bool:
    """Return whether the handler of a signal stays as it is."""
    handler = signal.getsignal(number)
    module = getattr(handler, "__module__", None) or ""
    is_foreign = callable(handler) and module.partition(".")[0] != __package__
    is_common = number in (signal.SIGINT, signal.SIGTERM)
    return handler in (None, signal.SIG_IGN) or (is_foreign and not is_common)


def discard_if_closed(stream: Any, is_full: bool = False) -> bool:
    """Discard what is written to a pipe or terminal that has closed, or to a full disk.

    Args:
        stream: Standard output or standard error.
        is_full: Whether its disk is full.

    Returns:
        Whether it is discarded.
    """
    try:
        number, output = stream.fileno(), select.poll()
    except (OSError, AttributeError):  # not a file, as in a notebook; Windows
        return False
    output.register(number, 0)
    is_discarded = is_full or any(
        event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)
    )
    if is_discarded:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)
    return is_discarded
