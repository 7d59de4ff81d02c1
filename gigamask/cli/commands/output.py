"""Progress bars, and lists of skipped items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich import progress

    from gigamask.data import worker_pool

MAX_REASONS = 5
"""Maximum number of reasons printed; `--json` has all."""


@contextmanager
def progress_bar(name: str) -> Iterator[worker_pool.Progress]:
    """Show a progress bar, and yield the function `progress(done, total)` that updates it."""
    with make_progress() as bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def make_progress(*columns: progress.ProgressColumn) -> progress.Progress:
    """Return a rich progress display on standard error, hidden if that is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_skipped(kind: str, reasons: Sequence[str]) -> None:
    """Print how many items were skipped and the first reasons; print nothing if there are none.

    Args:
        kind: What was skipped, such as "images".
        reasons: One line per skipped item.
    """
    if reasons:
        first = f", the first {MAX_REASONS}:" if len(reasons) > MAX_REASONS else ""
        print(f"  {kind} skipped: {len(reasons)}{first}")
    for reason in reasons[:MAX_REASONS]:
        print(f"    {reason}")
