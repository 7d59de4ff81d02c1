"""Joins order and loading: from a run and a cursor to the endless sequence of steps' batches.

Not here: the order (`samplers`), the cut into steps, ranks and micro-batches (`samplers.split`), the loading (`data.loader`).
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from gigamask.contracts import Batch, Chance, Cursor
from gigamask.data import index as indexes
from gigamask.data import loader
from gigamask.data.mask_store import MaskStore
from gigamask.faults import Fault
from gigamask.samplers import split
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


def feed(run: Run, index: indexes.Index, cursor: Cursor, pin: bool = False) -> Iterator[tuple[Batch, ...]]:
    """Yields, for every step from `cursor` on, its micro-batches."""
    items, rows = loader.items(index, run.loading.filters)
    if not items.count:
        why = "has a mask that passes the filters; loosen --loading.filters" if index.manifest.masks else "has a mask; give annotated images"
        raise Fault(f"{' '.join(run.data)}: none of {len(index)} images {why}")
    if run.assembly.mask_store:
        MaskStore.open(run.assembly.mask_store, index).check(run.assembly)
    chance = Chance(seed=run.seed, clicks=run.policy.draws, blocks=run.model.depth)
    # A process reads at as many places as a micro-batch has samples, each of which may lie across the border of two blocks.
    source = loader.Source(str(index.folder), run.assembly, chance, run.loading.read_ahead_mb * 2**20, 2 * run.micro)

    @lru_cache(maxsize=1)
    def order(epoch: int) -> np.ndarray:
        return rows[run.sampler.order(items, epoch, None)]

    per_epoch = len(order(0))
    groups = split.groups(order, per_epoch, cursor.samples, run.batch, run.micro)
    return loader.batches(source, groups, workers=run.loading.workers, pin=pin)
