"""From rows of the index to batches, in this process or in others, always the same ones.

In: a source (an index, how samples are made, their chance) and the steps' visits. Out: for each step the tuple of its micro-batches.
The loader keeps no state: what is delivered is a function of the visits alone, whatever the number of workers. A mask leaves a worker as runs of
the target grid, a few hundred bytes, and becomes dense on the device.

Not here: which rows are visited when (`samplers.split`), how a sample is made (`data.assemble`).
"""

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gigamask.contracts import Batch, Chance, Cursor, Draws, Group, Rejected, Sample, Visit
from gigamask.data import shards
from gigamask.data.annotation import parse
from gigamask.data.assemble import assemble
from gigamask.data.choose import Filters
from gigamask.data.index import Index
from gigamask.data.mask_store import MaskStore, assemble_stored
from gigamask.data.settings import Assembly
from gigamask.draws import draw
from gigamask.faults import BadSample, Fault
from gigamask.geometry.runs import Runs
from gigamask.seams import Items

PREFETCH = 2
IMAGES_AT_ONCE = 2**14
LOOKS = 8
FEW = 1 / 8
"""Picking the masks of more of a block's images than this takes longer than reading all of the block's from end to end."""
NAMES_TOLD = 8


class Job(NamedTuple):
    """What a worker is asked for: one micro-batch of a step."""

    visits: tuple[Visit, ...]
    start: int
    samples: int


@dataclass(frozen=True)
class Source:
    """Where samples come from. It may be pickled: index and tars are opened by the process that first reads.

    `read_ahead`: bytes of the blocks that remote tars are fetched in, `blocks` of which are held (`data.shards`); 0 for exactly what is asked for.
    """

    folder: str
    assembly: Assembly
    chance: Chance
    read_ahead: int = 0
    blocks: int = 4

    @cached_property
    def index(self) -> Index:
        return Index.open(self.folder)

    @cached_property
    def _shards(self) -> shards.Shards:
        return shards.Shards(self.index.shard_paths, read_ahead=self.read_ahead, blocks=self.blocks)

    @cached_property
    def _masks(self) -> MaskStore | None:
        return MaskStore.open(self.assembly.mask_store, self.index) if self.assembly.mask_store else None

    def sample(self, visit: Visit, entry: shards.Entry | BadSample | None = None) -> Sample:
        """Reads (unless what was read is given), checks and assembles one sample; raises `BadSample` when it cannot be used."""
        if isinstance(entry, BadSample):
            raise entry
        name, (jpg, json) = self.index.entry_name(visit.item), entry or self._shards.read_entry(self.index, visit.item)
        if self._masks is not None:
            return assemble_stored(jpg, self._masks, visit.item, visit.position, self.assembly, self.chance, visit.epoch)
        if json is None:
            raise BadSample(f"{name}: it has no json, training needs masks; leave it out")
        return assemble(jpg, parse(json, name), visit.position, self.assembly, self.chance, visit.epoch)

    def batch(self, job: Job) -> Batch:
        """Makes one micro-batch, whose bytes are read together; samples that cannot be used are left out and named in it."""
        samples, rejected = [], []
        entries = self._shards.read_entries(self.index, [visit.item for visit in job.visits], jsons=self._masks is None)
        for visit, entry in zip(job.visits, entries, strict=True):
            try:
                samples.append(self.sample(visit, entry))
            except BadSample as fault:
                rejected.append(Rejected(self.index.entry_name(visit.item), str(fault)))
        pause = float(draw(self.chance.seed, "pause", job.start).random())
        return collate(samples, tuple(rejected), self.assembly, self.chance, pause, Cursor(job.samples))

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def items(index: Index, filters: Filters) -> tuple[Items, Int64[np.ndarray, "N"]]:
    """Returns what can be sampled and each item's row: the images of which at least one mask passes the filters.

    Columns: masks, width, height, shard.
    """
    parts = [np.zeros(0, np.int64)]
    for start in range(0, len(index), IMAGES_AT_ONCE):
        stop = min(start + IMAGES_AT_ONCE, len(index))
        parts.append(start + np.flatnonzero(_usable(index, filters, start, stop)))
    rows = np.concatenate(parts)
    return Items(len(rows), {name: index.images[name][rows] for name in ("masks", "width", "height", "shard")}), rows


def _usable(index: Index, filters: Filters, start: int, stop: int) -> Bool[np.ndarray, "n"]:
    """Says which of the images `start` to `stop` have a mask that passes."""
    counts, first = index.images["masks"][start:stop], index.images["first_mask"][start : stop + 1]
    image_areas = index.images["width"][start:stop].astype(np.int64) * index.images["height"][start:stop]
    passes = np.zeros(stop - start, bool)
    # Most images pass by one of their first masks; only the others' masks are all looked at.
    for look in range(LOOKS):
        rest = np.flatnonzero(~passes & (counts > look))
        passes[rest] = _kept(index, filters, image_areas[rest], first[rest] + look)
    rest = np.flatnonzero(~passes & (counts > LOOKS))
    if len(rest) > FEW * len(passes):
        rest = np.flatnonzero(counts)
        kept = _kept(index, filters, np.repeat(image_areas, counts), slice(int(first[0]), int(first[-1])))
        passes[rest] = np.logical_or.reduceat(kept, first[rest] - first[0])
    elif len(rest):
        many = counts[rest].astype(np.int64)
        owner = np.repeat(np.arange(len(rest)), many)
        masks = np.arange(len(owner)) + np.repeat(first[rest] - (np.cumsum(many) - many), many)
        passes[rest] = np.bincount(owner[_kept(index, filters, image_areas[rest][owner], masks)], minlength=len(rest)) > 0
    return passes


def _kept(index: Index, filters: Filters, image_areas: Int64[np.ndarray, "n"], masks: Int64[np.ndarray, "n"] | slice) -> Bool[np.ndarray, "n"]:
    """Says which rows of the mask table pass; `image_areas` holds the pixels of each one's image."""

    def scores(name: str, least: float | None) -> Float32[np.ndarray, "n"]:
        # A column that no filter reads is not fetched: each has a billion rows.
        return np.ones(len(image_areas), np.float32) if least is None else index.masks[name][masks]

    predicted_iou = scores("predicted_iou", filters.min_predicted_iou)
    return filters.keep(index.masks["area"][masks], image_areas, predicted_iou, scores("stability_score", filters.min_stability))


def collate(
    samples: list[Sample],
    rejected: tuple[Rejected, ...],
    assembly: Assembly,
    chance: Chance,
    pause: float,
    cursor: Cursor,
) -> Batch:
    """Joins samples into one batch, masks on one flat axis; there may be no samples, and samples may have no masks."""
    side, grid = assembly.side, assembly.grid
    images = _blank((len(samples), 3, side, side))
    for image, sample in zip(images, samples, strict=True):
        height, width = sample.image.shape[1:]
        image[:, :height, :width] = sample.image
    nothing = Runs((grid, grid), np.zeros(0, np.int32), np.zeros(1, np.int64))
    masks = Runs.concatenate([nothing, *(sample.masks for sample in samples)])
    counts = torch.tensor([len(sample.masks) for sample in samples], dtype=torch.int64)
    boxes = np.concatenate([np.zeros((0, 4), np.float32), *(sample.boxes_input for sample in samples)])
    none = Draws(torch.zeros(0), torch.zeros((0, chance.clicks, 2)), torch.zeros((0, 4)), torch.zeros((0, chance.blocks, 2)))
    drawn = [none, *(sample.draws for sample in samples)]
    return Batch(
        names=tuple(sample.name for sample in samples),
        images=images,
        input_sizes=torch.tensor([sample.frame.resized for sample in samples], dtype=torch.int64).reshape(-1, 2),
        mask_image=torch.repeat_interleave(counts),
        boxes_input=torch.from_numpy(boxes),
        mask_bounds=torch.from_numpy(masks.bounds),
        mask_starts=torch.from_numpy(masks.starts),
        grid=grid,
        draws=Draws(**{field.name: torch.cat([getattr(each, field.name) for each in drawn]) for field in fields(Draws)}),
        pause=pause,
        cursor=cursor,
        rejected=rejected,
    )


def _blank(shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Returns zeros; in a loader's process they lie where the training process can read them, as with torch's own collate."""
    size = math.prod(shape)
    if get_worker_info() is None or not size:
        return torch.zeros(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size)).view(shape)


@dataclass(frozen=True)
class _Sent:
    """A batch on its way out of a loader's process: its images in shared memory, its other tensors as arrays.

    Each tensor that is sent takes a file of its own, and longer than what is in it.
    """

    images: UInt8[Tensor, "B 3 S S"]
    draws: dict[str, np.ndarray]
    rest: dict[str, Any]

    @classmethod
    def packed(cls, batch: Batch) -> "_Sent":
        """Packs a batch."""
        rest = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        draws = {field.name: getattr(batch.draws, field.name).numpy() for field in fields(Draws)}
        images = rest.pop("images")
        del rest["draws"]
        return cls(images, draws, {name: value.numpy() if isinstance(value, Tensor) else value for name, value in rest.items()})

    def unpacked(self) -> Batch:
        """Returns the batch."""
        rest: dict[str, Any] = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in self.rest.items()}
        return Batch(images=self.images, draws=Draws(**{name: torch.from_numpy(value) for name, value in self.draws.items()}), **rest)

    def pin_memory(self) -> Batch:
        """Returns the batch in pinned memory; torch's loader calls this."""
        return self.unpacked().pin_memory()


class _Jobs(Dataset):
    """Makes whatever it is asked for; a `Fault` is handed over rather than raised, so that it stays one line."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, index: Job) -> Batch | _Sent | Fault:
        try:
            batch = self.source.batch(index)
        except Fault as fault:
            return fault
        return batch if get_worker_info() is None else _Sent.packed(batch)


def _as_is(made: Any) -> Any:
    return made


def batches(source: Source, groups: Iterable[Group], workers: int = 0, pin: bool = False) -> Iterator[tuple[Batch, ...]]:
    """Yields each step's micro-batches in order; `workers` processes prepare them ahead, 0 makes them here.

    Raises `Fault` when a worker dies, naming it and the samples that were waited for. `pin` puts tensors into page-locked memory.
    """
    stream = _Stream(source, groups, workers, pin)
    try:
        for first in stream:
            yield first, *islice(stream, len(stream.ahead[0].micros) - 1)
            stream.ahead.popleft()
    finally:
        # Ends the workers now, also where a traceback still holds the stream.
        stream.made = iter(())


class _Stream:
    """The batches of every step one after the other, and the steps that were begun but not yet delivered."""

    def __init__(self, source: Source, groups: Iterable[Group], workers: int, pin: bool) -> None:
        self.source = source
        self.ahead: deque[Group] = deque()
        self.made: Iterator[Batch | _Sent | Fault] = iter(
            DataLoader(
                _Jobs(source),
                batch_size=None,
                sampler=_jobs(groups, self.ahead),
                num_workers=workers,
                collate_fn=_as_is,
                pin_memory=pin,
                prefetch_factor=PREFETCH if workers else None,
                persistent_workers=workers > 0,
                generator=torch.Generator(),  # torch draws a seed for its workers; from here it leaves the global generator alone
            )
        )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Returns the next micro-batch; raises the `Fault` that a worker met, or that one is dead."""
        try:
            made = next(self.made)
        except RuntimeError as error:
            made = self._death(str(error))
            if made is None:
                raise
        if isinstance(made, Fault):
            raise made
        return made.unpacked() if isinstance(made, _Sent) else made

    def _death(self, words: str) -> Fault | None:
        """Returns the `Fault` that says which worker is dead; None when torch's words are about something else."""
        # From its own check, or from its handler of SIGCHLD.
        gone = re.match(r"DataLoader worker (.*?(?:exited unexpectedly|is killed by signal: [^.]*))", words)
        if gone is None or not self.ahead:
            return None
        group = self.ahead[0]
        names = [self.source.index.entry_name(visit.item) for visits in group.micros for visit in visits]
        more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
        return Fault(
            f"the loader worker {gone[1]} while samples from {group.start} on were waited for ({', '.join(names[:NAMES_TOLD])}{more}); often memory "
            "ran out: run the same command again with fewer --loading.workers, training goes on from the last checkpoint"
        )


def _jobs(groups: Iterable[Group], ahead: deque[Group]) -> Iterator[Job]:
    """Yields what workers are asked for, and notes each step that is begun."""
    for group in groups:
        ahead.append(group)
        for visits in group.micros:
            yield Job(visits, group.start, group.samples)
