"""The bar that shows how far a verb is: on standard error, where that is a terminal, and gone when the work is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress

    from gigamask.data import worker_pool


@contextmanager
def bar(what: str) -> Iterator[worker_pool.Progress]:
    """Shows a bar named `what` and gives the function that moves it: `progress(done, total)`."""
    with display() as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def display(*columns: progress.ProgressColumn) -> progress.Progress:
    """Returns rich's bar of these columns, or of its own, to be entered."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
