"""What a configuration trains on: its samples, and the loader that makes batches of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gigamask.interfaces import SampleTable
from gigamask.samplers.batch_sampler import Locate
from gigamask.types import BatchProtocol, StepPlan


class BatchLoader(Protocol):
    """Loads the micro-batches of steps, possibly ahead of time."""

    def batches(self, plans: Iterable[StepPlan]) -> Iterator[tuple[BatchProtocol, ...]]:
        """Yield each step's micro-batches in order; exhaust it before the next call."""
        ...

    def close(self) -> None:
        """Stop worker processes and release buffers."""
        ...


@dataclass(frozen=True, eq=False)
class DataSource:
    """The samples of a training and their loader.

    Attributes:
        items: table of what can be sampled.
        locate: maps items to images and masks.
        description: what the samples depend on besides the data and the sampler; a history of
            losses is only reused where it is the same.
        make_loader: makes a loader of batches, in page-locked memory if its argument is true.
    """

    items: SampleTable
    locate: Locate
    description: str
    make_loader: Callable[[bool], BatchLoader]
