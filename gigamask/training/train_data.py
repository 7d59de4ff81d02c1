"""Joins order and loading: from a run and where it stands to the endless sequence of steps' batches, and back from steps' losses to later orders.

Not here: the order (`samplers`), the cut into steps, ranks and micro-batches (`samplers.batch_sampler`), the loading (`data.loader`).
"""

import json
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from gigamask.data import index as indexes
from gigamask.data import storage
from gigamask.distributed.world import World
from gigamask.errors import GigamaskError
from gigamask.samplers.batch_sampler import SampleSequence, iter_segments
from gigamask.samplers.loss_history import LossHistory
from gigamask.training.config import DATA, TrainConfig
from gigamask.training.data_source import DataSource
from gigamask.types import BatchProtocol, DataCursor


def open_index(run: TrainConfig) -> indexes.Index:
    """Returns the index of the run's data; tars that have none are indexed once, into the run folder."""
    return indexes.open_or_build(run.data, run.out)


def describe_data(run: TrainConfig, index: indexes.Index) -> dict[str, Any]:
    """Returns what the order of a run's samples depends on besides its configuration."""
    told = blake2b(digest_size=16)
    for path in run.tables:
        told.update(Path(path).read_bytes())
    return {
        "digest": index.digest,
        "images": len(index),
        "tars": len(index.shard_paths),
        "tables": told.hexdigest() if run.tables else None,
    }


def check_same_data(run: TrainConfig, data: dict[str, Any]) -> None:
    """Raises Fault when the run has trained on other data than those described: a tar more makes every sample that is left another one."""
    path = Path(run.out) / DATA
    if not path.exists() or not run.has_checkpoint:
        return
    before, act = (
        json.loads(path.read_text()),
        "put it back, give --allow-data-change, or another --out",
    )
    if before["digest"] != data["digest"]:
        words = [f"{each['images']} images in {each['tars']} tars" for each in (before, data)]
        raise GigamaskError(
            f"{run.out}: trained on {words[0]}, its data are {words[1]} now, so that the samples left would be others; {act}"
        )
    if before.get("tables") != data["tables"]:
        told = " ".join(run.tables) or "no table of attributes"
        raise GigamaskError(
            f"{told}: other than what {run.out} has trained with, so that its order would be another; {act}"
        )


def save_data_record(run: TrainConfig, data: dict[str, Any]) -> None:
    """Writes down what the run trains on."""
    storage.write(Path(run.out) / DATA, json.dumps(data).encode())


class TrainData:
    """What a run trains on from a cursor on. `book` is what its sampler learns from, new unless given; None where it does not learn."""

    def __init__(
        self,
        run: TrainConfig,
        index: indexes.Index,
        cursor: DataCursor | None = None,
        loss_history: LossHistory | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """`data` is what `described` says of the index, which a sampler that learns holds its book against."""
        self._run, self._supply, self._start = (
            run,
            run.data_source(index),
            (cursor or DataCursor()).samples,
        )
        items = self._supply.items
        self.loss_history = loss_history = (
            None
            if run.sampler.decay is None
            else _loss_history(run, data or describe_data(run, index), self._supply, loss_history)
        )
        self._sequence = SampleSequence(
            run.sampler, items, loss_history, self._supply.locate, run.strata
        )

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the sampler visits in one epoch."""
        return self._sequence.epoch_length

    def batches(
        self, world: World | None = None, pin: bool = False
    ) -> Iterator[tuple[BatchProtocol, ...]]:
        """Yields, for every step, this process's micro-batches."""
        run, world = self._run, world or World()
        made = self._supply.loader(pin)
        try:
            for leg in iter_segments(
                self._sequence,
                self._start,
                run.batch_size,
                run.micro_batch_size,
                world.place,
                world.size,
            ):
                yield from made.batches(leg)
        finally:
            made.close()

    def note(self, start: int, losses: Float64[np.ndarray, "batch"]) -> None:
        """Takes the losses of the step that began behind `start` samples, before the next step's batches are asked for."""
        self._sequence.record_losses(start, losses)


def _loss_history(
    run: TrainConfig, data: dict[str, Any], supply: DataSource, before: LossHistory | None
) -> LossHistory:
    """Returns the book of a sampler that learns: the one from before, if it is of the same sampler and items."""
    told = f"{run.sampler!r} {supply.told} {json.dumps(data)}"
    subject = blake2b(told.encode(), digest_size=16).hexdigest()
    if before is not None and before.subject == subject:
        return before
    if before is not None:
        warnings.warn(
            f"{run.out}: its ledger of losses is of another sampler or other data, a new one is begun",
            stacklevel=2,
        )
    return LossHistory.empty(subject, supply.items.count, run.sampler.decay or 0.0)
