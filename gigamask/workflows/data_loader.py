"""Training batches without a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gigamask.data.storage import Paths, path_list
from gigamask.workflows.open_data import open_index

if TYPE_CHECKING:
    from gigamask.training.config import TrainConfig
    from gigamask.types import BatchProtocol


class DataLoader:
    """Iterable over the batches of images and masks that a recipe trains on.

    Each iteration yields the batches of one epoch and drops an incomplete last batch; the next
    iteration, also after one that was left early, is the next epoch. Order, masks, augmentation and
    random numbers are those of training with the recipe's seed.
    """

    def __init__(
        self,
        data: Paths,
        recipe: str | TrainConfig = "tiny",
        *,
        batch_size: int | None = None,
        num_workers: int | None = None,
        strict: bool = False,
    ) -> None:
        """Index the data if they have no index, and check the configuration.

        Args:
            data: Tars, folders of tars, globs, URLs, or an index; or what `train` converts, such as
                parquet files, or the path that `images` or `masks` of the configuration belong to.
            recipe: Name of a recipe, or a configuration.
            batch_size: Images per batch; None means the recipe's.
            num_workers: Loader processes; None means the recipe's, 0 loads in this process.
            strict: Whether it is an error if an image or a mask is left out of a conversion.

        Raises:
            GigamaskError: The data cannot be used, or no image has a mask.
        """
        from gigamask import recipes
        from gigamask.training.train_data import TrainData
        from gigamask.workflows.own_data import use_own_data

        config: Any = recipes.make(recipe)
        config = use_own_data(replace(config, data=path_list(data)), strict=strict)
        if batch_size is not None:
            config = replace(config, batch_size=batch_size)
        if num_workers is not None:
            config = replace(config, loader=replace(config.loader, workers=num_workers))
        self.config = replace(config, micro_batch_size=config.batch_size).check()
        self.index = open_index(self.config.data)
        self._epoch = 0
        self._samples_per_epoch = TrainData(self.config, self.index).samples_per_epoch

    def __len__(self) -> int:
        """Return the number of batches of an epoch, at least 1."""
        return max(1, self._samples_per_epoch // self.config.batch_size)

    def __iter__(self) -> Iterator[BatchProtocol]:
        """Yield the batches of the next epoch."""
        from gigamask.records import DataCursor
        from gigamask.training.train_data import TrainData

        start = DataCursor(self._epoch * self._samples_per_epoch)
        self._epoch += 1
        steps = TrainData(self.config, self.index, start).batches()
        try:
            for _ in range(len(self)):
                (batch,) = next(steps)
                yield batch
        finally:
            steps.close()
