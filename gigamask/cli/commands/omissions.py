"""What a verb says of what it left out: how much, and the first few reasons; `--json` has all."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 5


def tell(what: str, reasons: Sequence[str]) -> None:
    """Prints how many of something were left out and why the first of them were, where there are any."""
    if reasons:
        print(
            f"  {what} left out: {len(reasons)}"
            + (f", the first {SHOWN}:" if len(reasons) > SHOWN else "")
        )
    for reason in reasons[:SHOWN]:
        print(f"    {reason}")
