"""Training batches: combines the sampler and the loader, and records losses."""

import json
import warnings
from collections.abc import Generator
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from gigamask import files, serialization
from gigamask.data import index as indexes
from gigamask.errors import GigamaskError, counted
from gigamask.records import DataCursor
from gigamask.samplers.batch_sampler import SampleSequence, iter_segments
from gigamask.training.config import DATA, TrainConfig, item_sampler
from gigamask.training.data_source import DataSource
from gigamask.types import BatchProtocol

if TYPE_CHECKING:
    from gigamask.distributed.world import World
    from gigamask.samplers.loss_history import LossHistory


def open_index(config: TrainConfig) -> indexes.Index:
    """Return the index of the training data; tars without one are indexed into the run folder."""
    return indexes.open_or_build(config.data, config.out)


def describe_data(config: TrainConfig, index: indexes.Index) -> dict[str, Any]:
    """Describe what the order of samples depends on besides the configuration.

    Args:
        config: The configuration.
        index: Index of its data.

    Returns:
        Digest of the index, numbers of images and tars, and digest of the other tables, if any.
    """
    digest = blake2b(digest_size=16)
    for path in config.tables:
        with open(path, "rb") as file:
            digest.update(file_digest(file, "blake2b").digest())
    return {
        "digest": index.digest,
        "images": len(index),
        "tars": len(index.shard_paths),
        "tables": digest.hexdigest() if config.tables else None,
    }


def check_same_data(config: TrainConfig, data: dict[str, Any]) -> None:
    """Check that a run continues on the same data, since one more tar would change the order.

    Args:
        config: The configuration.
        data: Result of `describe_data`.

    Raises:
        GigamaskError: The data have changed.
    """
    if not config.has_checkpoint:
        return
    action = "restore them, add --allow-data-change, or use another --out"
    before = read_data_record(config)
    if before is None:
        return
    if before["digest"] != data["digest"]:
        old, new = (
            f"{counted(each['images'], 'image')} in {counted(each['tars'], 'tar')}"
            for each in (before, data)
        )
        raise GigamaskError(
            f"{config.out}: the data have changed, from {old} to {new}, "
            f"which changes the remaining samples; {action}"
        )
    if before.get("tables") != data["tables"]:
        tables = " ".join(config.tables) or "no attribute table"
        raise GigamaskError(
            f"{tables}: changed since {config.out} was started, which changes what it trains on; "
            f"{action}"
        )


def save_data_record(config: TrainConfig, data: dict[str, Any]) -> None:
    """Write the description of the data to the run folder.

    Args:
        config: The configuration.
        data: Result of `describe_data`.
    """
    files.write_bytes(Path(config.out) / DATA, serialization.with_checksum(data))


def read_data_record(config: TrainConfig) -> dict[str, Any] | None:
    """Return the description of the data that a run was started with; None if it has none.

    Raises:
        GigamaskError: The file is damaged.
    """
    path = Path(config.out) / DATA
    if not path.exists():
        return None
    try:
        data = serialization.read_json(path)
        serialization.check_checksum(data, str(path))
    except GigamaskError as error:
        raise GigamaskError(
            f"{error}; if the data are those of the run, remove the file and run the command again"
        ) from None
    return data


class TrainData:
    """Training batches, starting at a cursor.

    Args:
        config: The configuration.
        index: Index of its data.
        cursor: Where to start; None starts with the first sample.
        loss_history: Losses so far, for a sampler that learns from them; None starts a new history.
        data: Result of `describe_data`; None computes it when needed.
    """

    def __init__(
        self,
        config: TrainConfig,
        index: indexes.Index,
        cursor: DataCursor | None = None,
        loss_history: "LossHistory | None" = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        self._config, self._source = config, config.data_source(index)
        self._start = (cursor or DataCursor()).samples
        self.loss_history: "LossHistory | None" = None
        if config.sampler.decay is not None:
            data = data or describe_data(config, index)
            self.loss_history = _loss_history(config, data, self._source, loss_history)
        self._sequence = SampleSequence(
            item_sampler(config),
            self._source.items,
            self.loss_history,
            self._source.locate,
            config.mining.use_sampler_strata,
        )
        self._sequence.check_lengths(config.steps * config.batch_size)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that the sampler visits in one epoch."""
        return self._sequence.epoch_length

    def save_run_files(self) -> None:
        """Write what inference needs besides the weights to the run folder."""
        for name, content in self._source.run_files.items():
            files.write_text(Path(self._config.out) / name, content)

    def batches(
        self, world: "World | None" = None, pin: bool = False
    ) -> Generator[tuple[BatchProtocol, ...]]:
        """Yield this process's micro-batches of each step.

        Args:
            world: The processes of the run; None means only this one.
            pin: Whether to load tensors into pinned memory.
        """
        from gigamask.distributed.world import World

        config, world = self._config, world or World()
        loader = self._source.make_loader(pin)
        try:
            for segment in iter_segments(
                self._sequence,
                self._start,
                config.batch_size,
                config.micro_batch_size or 1,
                world.interleaved_rank,
                world.size,
            ):
                yield from loader.batches(segment)
        finally:
            loader.close()

    def record_losses(self, start: int, losses: Float64[np.ndarray, "batch"]) -> None:
        """Record the losses of a step before the batches of the next one are requested.

        Args:
            start: Number of samples consumed before the step.
            losses: Loss of each sample of the global batch, NaN if there is none.
        """
        self._sequence.record_losses(start, losses)


def _loss_history(
    config: TrainConfig, data: dict[str, Any], source: DataSource, saved: "LossHistory | None"
) -> "LossHistory":
    """Return the saved history if it belongs to the same sampler and items, else an empty one."""
    text = f"{config.sampler!r} {source.description} {json.dumps(data)}"
    subject = blake2b(text.encode(), digest_size=16).hexdigest()
    if saved is not None:
        if saved.subject == subject:
            return saved
        warnings.warn(
            f"{config.out}: its loss history belongs to another sampler or other data; "
            "starting a new one",
            stacklevel=2,
        )
    from gigamask.samplers.loss_history import LossHistory

    return LossHistory.empty(subject, source.items.count, config.sampler.decay or 0.0)
