"""The parts of a step, by name, as ranges of a trace; nothing at all while nobody records one.

Not here: what is made of them (`memory.profiler`).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch
from torch.profiler import record_function

Made = TypeVar("Made")

PREFIX = "gigamask: "
"""Of the name of every range, so that they are told from operators."""


@contextmanager
def profile_range(name: str) -> Iterator[None]:
    """Marks what is done within, or by the function it is put before, as that part of a step."""
    with record_function(PREFIX + name) if torch.autograd._profiler_enabled() else nullcontext():
        yield


def profile_generator(name: str, makes: Iterable[Made]) -> Iterator[Made]:
    """Yields what is made, and marks the making of each; not what is done with it, and none is held while the next one is made."""
    iterator = iter(makes)
    while True:
        with profile_range(name):
            try:
                made = next(iterator)
            except StopIteration:
                return
        yield made
        del made
