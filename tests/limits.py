"""Limits of the operating system on what a test may write."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_limited(size: int) -> Iterator[None]:
    """Let no file grow beyond some bytes, as on a full disk.

    Python would store compiled modules that are cut off, which nothing could import afterwards.

    Args:
        size: Bytes.
    """
    limits, writes = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes
