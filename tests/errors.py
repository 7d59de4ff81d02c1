"""Errors that users read."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gigamask.errors import GigamaskError


@contextmanager
def error_line(pattern: str) -> Iterator[pytest.ExceptionInfo[GigamaskError]]:
    """Check that a block raises a `GigamaskError` of one line.

    Args:
        pattern: What the line holds, a regular expression.
    """
    with pytest.raises(GigamaskError, match=pattern) as caught:
        yield caught
    assert "\n" not in str(caught.value), caught.value
