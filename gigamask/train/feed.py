"""Joins order and loading: from a run and where it stands to the endless sequence of steps' batches, and back from steps' losses to later orders.

Not here: the order (`samplers`), the cut into steps, ranks and micro-batches (`samplers.split`), the loading (`data.loader`).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from gigamask.contracts import Batch, Chance, Cursor
from gigamask.data import attributes, loader
from gigamask.data import index as indexes
from gigamask.data.items import open_items
from gigamask.data.mask_store import MaskStore
from gigamask.faults import Fault
from gigamask.parallel.world import World
from gigamask.samplers import split
from gigamask.samplers.ledger import Book
from gigamask.samplers.sequence import Sequence
from gigamask.train.run import DATA, Run


def open_index(run: Run) -> indexes.Index:
    """Returns the index of the run's data; tars that have none are indexed once, into the run folder.

    Raises Fault when the run has trained on other data: a tar more would make every sample that is left another one.
    """
    index = indexes.open_or_build(run.data, run.out)
    found, path = {"digest": index.digest, "images": len(index), "tars": len(index.shard_paths)}, Path(run.out) / DATA
    before = json.loads(path.read_text()) if path.exists() and any(Path(run.out).glob("checkpoints/step_*")) else found
    if before != found:
        words = [f"{each['images']} images in {each['tars']} tars" for each in (before, found)]
        act = "put it back, give --allow-other-order, or another --out"
        raise Fault(f"{run.out}: trained on {words[0]}, its data are {words[1]} now, so that the samples left would be others; {act}")
    path.write_text(json.dumps(found) + "\n")
    return index


class Feed:
    """What a run trains on from a cursor on. `book` is what its sampler learns from, new unless given; None where it does not learn."""

    def __init__(self, run: Run, index: indexes.Index, cursor: Cursor | None = None, book: Book | None = None) -> None:
        table = attributes.read(run.loading.attributes, index) if run.loading.attributes else None
        found = open_items(index, run.loading.filters, run.loading.items, table, run.seed)
        if not found.items.count:
            why = "has a mask that passes the filters; loosen --loading.filters" if index.manifest.masks else "has a mask; give annotated images"
            raise Fault(f"{' '.join(run.data)}: none of {len(index)} images {why}")
        if run.assembly.mask_store:
            MaskStore.open(run.assembly.mask_store, index).check(run.assembly)
        if run.sampler.decay is not None and (book is None or len(book.losses) != found.items.count):
            book = Book.empty(found.items.count, run.sampler.decay)
        self.book = book
        self._run, self._index, self._start = run, index, (cursor or Cursor()).samples
        self._sequence = Sequence(run.sampler, found.items, book, found.locate)

    def batches(self, world: World | None = None, pin: bool = False) -> Iterator[tuple[Batch, ...]]:
        """Yields, for every step, this process's micro-batches."""
        run, world = self._run, world or World()
        chance = Chance(seed=run.seed, clicks=run.policy.draws, blocks=run.model.depth)
        # A process reads at as many places as a micro-batch has samples, each of which may lie across the border of two blocks.
        source = loader.Source(str(self._index.folder), run.assembly, chance, run.loading.read_ahead_mb * 2**20, 2 * run.micro)
        made = loader.Loader(source, run.loading.workers, pin)
        try:
            for leg in split.legs(self._sequence, self._start, run.batch, run.micro, world.place, world.size):
                yield from made.batches(leg)
        finally:
            made.close()

    def note(self, start: int, losses: Float64[np.ndarray, "batch"]) -> None:
        """Takes the losses of the step that began behind `start` samples, before the next step's batches are asked for."""
        self._sequence.note(start, losses)
