"""Progress bars, and lists of what was skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress

    from gigamask.data import worker_pool

MAX_REASONS = 5
"""Reasons printed; `--json` has all."""


@contextmanager
def progress_bar(name: str) -> Iterator[worker_pool.Progress]:
    """Show a progress bar, and yield the function `progress(done, total)` that moves it."""
    with make_progress() as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def make_progress(*columns: progress.ProgressColumn) -> progress.Progress:
    """Return rich's progress display on standard error; hidden if that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_skipped(kind: str, reasons: Sequence[str]) -> None:
    """Print how many things were skipped and the first reasons; nothing if none was.

    Args:
        kind: What was skipped, such as "images".
        reasons: One line for each.
    """
    if reasons:
        first = f", the first {MAX_REASONS}:" if len(reasons) > MAX_REASONS else ""
        print(f"  {kind} skipped: {len(reasons)}{first}")
    for reason in reasons[:MAX_REASONS]:
        print(f"    {reason}")
