"""Which parameters of a test `make test` leaves to `make test-long`."""

from collections.abc import Sequence
from typing import Any

import pytest


def long_after(count: int, values: Sequence[Any]) -> list[Any]:
    """Return the parameters of a test, marked `long` but for the first `count`.

    Args:
        count: How many `make test` runs.
        values: The parameters; a tuple is several arguments.
    """
    marked = [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in values[count:]
    ]
    return [*values[:count], *marked]
