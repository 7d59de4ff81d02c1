"""The data of a configuration: its samples, and the loader of their batches."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gigamask.errors import check_processes
from gigamask.interfaces import SampleTable
from gigamask.records import StepPlan
from gigamask.samplers.batch_sampler import Locate
from gigamask.types import BatchProtocol

MAX_LOADERS = 24
"""Most loader processes that are started unasked; each takes up to 120 MB."""


class BatchLoader(Protocol):
    """Loads the micro-batches of steps, possibly ahead of time."""

    def batches(self, plans: Iterable[StepPlan]) -> Iterator[tuple[BatchProtocol, ...]]:
        """Yield each step's micro-batches in order; exhaust the iterator before the next call."""
        ...

    def close(self) -> None:
        """Stop worker processes and release buffers."""
        ...


@dataclass(frozen=True, eq=False)
class DataSource:
    """The training samples and their loader.

    Attributes:
        items: Table of what can be sampled.
        locate: Maps items to images and masks.
        description: What the samples depend on besides the data and the sampler; a loss history is
            reused only if it is the same.
        make_loader: Makes a loader of batches, in pinned memory if its argument is true.
        run_files: Text files for the run folder by name, which inference needs besides the weights.
    """

    items: SampleTable
    locate: Locate
    description: str
    make_loader: Callable[[bool], BatchLoader]
    run_files: Mapping[str, str] = field(default_factory=dict)


def loader_processes(workers: int | None, on_gpu: bool) -> int:
    """Return the number of loader processes of one training process.

    Args:
        workers: The number that is asked for. None chooses it: 1 on a CPU, where training takes the
            other cores; on a GPU, this process's part of the machine's cores but one.
        on_gpu: Whether the training runs on a GPU.

    Raises:
        GigamaskError: More are asked for than the machine can hold.
    """
    check_processes("--loader.workers", workers or 1)
    if workers is not None or not on_gpu:
        return 1 if workers is None else workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    own = (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(max(own - 1, 1), MAX_LOADERS)
