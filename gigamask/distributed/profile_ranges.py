"""Named profiler ranges for the parts of a step; they do nothing without a profiler."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch.profiler import record_function

Item = TypeVar("Item")

PREFIX = "gigamask: "
"""Prefix of every range's name, which distinguishes ranges from operators."""


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """Record the code within, or the decorated function, as a named part of a step."""
    with record_function(PREFIX + name) if torch.autograd._profiler_enabled() else nullcontext():
        yield


def profile_generator(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Yield items and record the computation of each, but not its use by the caller.

    Args:
        name: Name of the range.
        items: Items, computed one by one; no reference is kept while the next one is computed.
    """
    iterator = iter(items)
    while True:
        with profile_range(name):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item
        del item
