"""Say what a command is about to do, and on standard error how far it is.

In a terminal a bar moves, elsewhere, as in a notebook, a line is printed every ten seconds;
`--progress` chooses.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich import progress

MODES = ("bar", "lines", "none")
CHOSEN: ContextVar[str] = ContextVar("progress", default="")
"""The value of `--progress`. It changes what is shown and nothing that is computed, so that it is
not handed down as an argument."""
BARS: ContextVar[progress.Progress | None] = ContextVar("bars", default=None)
"""The display of a training, in which the bars of its evaluations are shown, too."""
INTERVAL_S = 10.0
"""Seconds between two lines."""
Update = Callable[[float, int], object]
"""Called as `update(done, total)` after each item, or part of one."""


def mode() -> str:
    """Return how progress is shown: "bar", "lines" or "none"."""
    return CHOSEN.get() or ("bar" if sys.stderr.isatty() else "lines")


def say(line: str, on_error: bool = False) -> None:
    """Print a line, unless nothing is to be shown.

    Args:
        line: The line.
        on_error: Whether to print it on standard error.
    """
    if mode() != "none":
        with suppress(OSError):  # a closed terminal
            print(line, file=sys.stderr if on_error else sys.stdout, flush=True)


@contextmanager
def progress_bar(name: str) -> Iterator[Update]:
    """Show how far some work is, and yield the function that updates it.

    Args:
        name: What is done.
    """
    if mode() == "bar":
        shown = BARS.get()
        with nullcontext(shown) if shown else make_bars() as bars:
            task = bars.add_task(name, total=None, figures="")
            try:
                yield lambda done, total: bars.update(task, completed=done, total=total)
            finally:
                bars.remove_task(task)
        return
    reached, start_s, is_over = (0.0, 0), time.monotonic(), threading.Event()
    before = 0.0  # done in the first second, as what an earlier run has done is

    def update(done: float, total: int) -> None:
        nonlocal reached, before
        reached = done, total
        if time.monotonic() < start_s + INTERVAL_S / 10:
            before = done

    def report() -> None:
        while not is_over.wait(INTERVAL_S):
            (done, total), elapsed_s = reached, time.monotonic() - start_s
            count = f" {int(done)} of {total}," if total else ""
            line = f"{name}:{count} {elapsed_s:.0f} s"
            if done > before:
                line += f", {elapsed_s * (total - done) / (done - before):.0f} s left"
            say(line, on_error=True)

    thread = threading.Thread(target=report, daemon=True)
    if mode() == "lines":
        thread.start()
    try:
        yield update
    finally:
        is_over.set()
        if thread.ident:
            thread.join()


def make_bars(*columns: str | progress.ProgressColumn, **options: Any) -> progress.Progress:
    """Return rich's progress display on standard error, hidden unless bars are shown.

    Args:
        *columns: Its columns; none means rich's.
        **options: More of its arguments.
    """
    from rich.console import Console
    from rich.progress import Progress

    is_bar = mode() == "bar"
    known: dict[str, Any] = {
        "console": Console(stderr=True, force_terminal=is_bar or None),
        "transient": True,
        "redirect_stdout": sys.stdout.isatty(),  # else it would go to standard error
        "disable": not is_bar,
    }
    return Progress(*columns, **known | options)


def track(items: Sequence[Any], name: str) -> Iterator[Any]:
    """Yield items, and show how many are done.

    Args:
        items: The items.
        name: What is done with them.
    """
    with progress_bar(name) as update:
        for done, item in enumerate(items):
            update(done, len(items))
            yield item
