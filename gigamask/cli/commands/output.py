"""Lists of skipped items."""

from __future__ import annotations

from collections.abc import Sequence

MAX_REASONS = 5
"""Maximum number of reasons printed; `--json` has all."""


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
