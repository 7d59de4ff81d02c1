"""Errors that users read."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from gigamask.errors import CorruptSampleError, GigamaskError


@contextmanager
def error_line(
    pattern: str, kind: type[GigamaskError] = GigamaskError
) -> Iterator[pytest.ExceptionInfo[GigamaskError]]:
    """Check that a block raises a `GigamaskError` of one line.

    Args:
        pattern: What the line holds, a regular expression.
        kind: The class of the error, or one above it.
    """
    with pytest.raises(kind, match=pattern) as caught:
        yield caught
    assert "\n" not in str(caught.value), caught.value


corrupt_sample = partial(error_line, kind=CorruptSampleError)
"""Check that a block raises a `CorruptSampleError` of one line."""
