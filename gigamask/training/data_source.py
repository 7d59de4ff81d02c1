"""What a run trains on, as it hands it to the loop.

Not here: how images become such (`train.feed`), queries (`grounding.data`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gigamask.interfaces import SampleTable
from gigamask.samplers.batch_sampler import Locate
from gigamask.types import BatchProtocol, StepPlan


class BatchLoader(Protocol):
    """Makes the micro-batches of steps, ahead of time if it likes."""

    def batches(self, groups: Iterable[StepPlan]) -> Iterator[tuple[BatchProtocol, ...]]:
        """Yields each step's micro-batches in order; all of them must have been taken before more are asked for."""
        ...

    def close(self) -> None:
        """Ends what it has begun."""
        ...


@dataclass(frozen=True, eq=False)
class DataSource:
    """What a run trains on: the items, where each lies, what else than data and sampler decides which they are, and what makes batches of them, in
    page-locked memory if asked."""

    items: SampleTable
    locate: Locate
    told: str
    loader: Callable[[bool], BatchLoader]
