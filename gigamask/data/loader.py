"""From rows of the index to batches, in this process or in others, always the same ones.

In: a source (an index, how samples are made, their chance) and the steps' visits. Out: for each step the tuple of its micro-batches.
The loader keeps no state: what is delivered is a function of the visits alone, whatever the number of workers. A mask leaves a worker as runs of
the target grid, a few hundred bytes, and becomes dense on the device.

Not here: which rows are visited when (`samplers.batch_sampler`), how a sample is made (`data.dataset`).
"""

import math
import re
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gigamask.data.dataset import RawSample, Sa1bDataset, build_sample
from gigamask.data.index import Index
from gigamask.data.mask_store import MaskStore, build_stored_sample
from gigamask.data.sample_config import SampleConfig
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from gigamask.rng import make_rng
from gigamask.types import (
    Batch,
    DataCursor,
    ImageAnnotation,
    RandomInputs,
    RandomSpec,
    Sample,
    SampleRef,
    SkippedSample,
    StepPlan,
)

PREFETCH = 2
NAMES_TOLD = 8


class BatchJob(NamedTuple):
    """What a worker is asked for: one micro-batch of a step."""

    visits: tuple[SampleRef, ...]
    start: int
    samples: int


@dataclass(frozen=True)
class SampleSource:
    """Where samples come from. It may be pickled: index and tars are opened by the process that first reads.

    `read_ahead`: bytes of the blocks that remote tars are fetched in, `blocks` of which are held (`data.shards`); 0 for exactly what is asked for.
    """

    folder: str
    sample_config: SampleConfig
    random_spec: RandomSpec
    read_ahead: int = 0
    blocks: int = 4

    @cached_property
    def index(self) -> Index:
        return Index.open(self.folder)

    @cached_property
    def dataset(self) -> Sa1bDataset:
        return Sa1bDataset(self.index, self.read_ahead, self.blocks)

    @cached_property
    def _masks(self) -> MaskStore | None:
        return (
            MaskStore.open(self.sample_config.mask_store, self.index)
            if self.sample_config.mask_store
            else None
        )

    def sample(self, visit: SampleRef, raw: RawSample | CorruptSampleError | None = None) -> Sample:
        """Read, check and build one sample.

        Args:
            visit: which row of the index is sampled, and when.
            raw: the bytes, where they have been read already.

        Raises:
            CorruptSampleError: the sample cannot be used.
        """
        if raw is None:
            [raw] = self._read([visit])
        if isinstance(raw, CorruptSampleError):
            raise raw
        if self._masks is not None:
            return build_stored_sample(
                raw.jpg, self._masks, visit, self.sample_config, self.random_spec
            )
        entry = (
            raw.annotation()
            if self.sample_config.masks
            else self._without_masks(visit.row, raw.name)
        )
        return build_sample(raw.jpg, entry, visit, self.sample_config, self.random_spec)

    def batch(self, job: BatchJob) -> Batch:
        """Makes one micro-batch, whose bytes are read together; samples that cannot be used are left out and named in it."""
        samples, rejected = [], []
        for visit, raw in zip(job.visits, self._read(job.visits), strict=True):
            try:
                samples.append(self.sample(visit, raw))
            except CorruptSampleError as fault:
                rejected.append(SkippedSample(self.index.entry_name(visit.row), str(fault)))
        pause = float(make_rng(self.random_spec.seed, "pause", job.start).random())
        return collate(
            samples,
            tuple(rejected),
            self.sample_config,
            self.random_spec,
            pause,
            DataCursor(job.samples),
        )

    def _read(self, visits: Sequence[SampleRef]) -> list[RawSample | CorruptSampleError]:
        """Read the bytes that samples are made of; jsons only where they are used."""
        with_json = self.sample_config.masks and self._masks is None
        return self.dataset.read_many([visit.row for visit in visits], with_json)

    def _without_masks(self, row: int, name: str) -> ImageAnnotation:
        """Returns what is said of an image where its masks are left aside."""
        size, none = (
            (int(self.index.images["height"][row]), int(self.index.images["width"][row])),
            np.zeros(0, np.float32),
        )
        return ImageAnnotation(
            name, size, RLEMasks(size, np.zeros(0, np.int32), np.zeros(1, np.int64)), none, none
        )

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def collate(
    samples: list[Sample],
    rejected: tuple[SkippedSample, ...],
    assembly: SampleConfig,
    chance: RandomSpec,
    mask_only_round_u: float,
    cursor: DataCursor,
) -> Batch:
    """Joins samples into one batch, masks on one flat axis; there may be no samples, and samples may have no masks."""
    side, grid = assembly.image_size, assembly.mask_size
    images = _blank((len(samples), 3, side, side))
    for image, sample in zip(images, samples, strict=True):
        height, width = sample.image.shape[1:]
        image[:, :height, :width] = sample.image
    nothing = RLEMasks((grid, grid), np.zeros(0, np.int32), np.zeros(1, np.int64))
    masks = RLEMasks.concatenate([nothing, *(sample.masks for sample in samples)])
    counts = torch.tensor([len(sample.masks) for sample in samples], dtype=torch.int64)
    boxes = np.concatenate(
        [np.zeros((0, 4), np.float32), *(sample.boxes_input for sample in samples)]
    )
    blank = (
        (0,),
        (0, chance.clicks + chance.points, 2),
        (0, 4),
        (0, chance.blocks, 2),
        (0, chance.patches),
    )
    none = RandomInputs(*map(torch.zeros, blank))
    drawn = [none, *(sample.random_inputs for sample in samples)]
    return Batch(
        names=tuple(sample.name for sample in samples),
        images=images,
        input_sizes=torch.tensor(
            [sample.transform.resized for sample in samples], dtype=torch.int64
        ).reshape(-1, 2),
        batch_index=torch.tensor([sample.ref.batch_index for sample in samples], dtype=torch.int64),
        weights=torch.tensor([sample.ref.weight for sample in samples], dtype=torch.float32),
        mask_image=torch.repeat_interleave(counts),
        strata=torch.from_numpy(
            np.concatenate([np.zeros(0, np.int64), *(sample.strata for sample in samples)])
        ),
        boxes_input=torch.from_numpy(boxes),
        rle_bounds=torch.from_numpy(masks.bounds),
        rle_offsets=torch.from_numpy(masks.starts),
        mask_size=grid,
        random_inputs=RandomInputs(
            **{
                field.name: torch.cat([getattr(each, field.name) for each in drawn])
                for field in fields(RandomInputs)
            }
        ),
        mask_only_round_u=mask_only_round_u,
        cursor=cursor,
        rejected=rejected,
    )


def _blank(shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Returns zeros; in a loader's process they lie where the training process can read them, as with torch's own collate."""
    size = math.prod(shape)
    if get_worker_info() is None or not size:
        return torch.zeros(shape, dtype=torch.uint8)
    return (
        torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size)).view(shape)
    )


@dataclass(frozen=True)
class _PackedBatch:
    """A batch on its way out of a loader's process: its images in shared memory, its other tensors as arrays.

    Each tensor that is sent takes a file of its own, and longer than what is in it.
    """

    images: UInt8[Tensor, "B 3 S S"]
    random_inputs: dict[str, np.ndarray]
    rest: dict[str, Any]

    @classmethod
    def packed(cls, batch: Batch) -> "_PackedBatch":
        """Packs a batch."""
        rest = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        draws = {
            field.name: getattr(batch.random_inputs, field.name).numpy()
            for field in fields(RandomInputs)
        }
        images = rest.pop("images")
        del rest["draws"]
        return cls(
            images,
            draws,
            {
                name: value.numpy() if isinstance(value, Tensor) else value
                for name, value in rest.items()
            },
        )

    def unpacked(self) -> Batch:
        """Returns the batch."""
        rest: dict[str, Any] = {
            name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in self.rest.items()
        }
        return Batch(
            images=self.images,
            random_inputs=RandomInputs(
                **{name: torch.from_numpy(value) for name, value in self.random_inputs.items()}
            ),
            **rest,
        )

    def pin_memory(self) -> Batch:
        """Returns the batch in pinned memory; torch's loader calls this."""
        return self.unpacked().pin_memory()


class _JobDataset(Dataset):
    """Makes whatever it is asked for; a `GigamaskError` is handed over rather than raised, so that it stays one line."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, index: BatchJob) -> Batch | _PackedBatch | GigamaskError:
        try:
            batch = self.source.batch(index)
        except GigamaskError as fault:
            return fault
        return batch if get_worker_info() is None else _PackedBatch.packed(batch)


def _as_is(made: Any) -> Any:
    return made


def _leave_signals(worker: int) -> None:
    """Leaves it to the training process to stop: terminals and batch systems tell all processes, and it still waits for what its workers make."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def batches(
    source: SampleSource, groups: Iterable[StepPlan], workers: int = 0, pin: bool = False
) -> Iterator[tuple[Batch, ...]]:
    """Yields each step's micro-batches in order, and ends the processes that made them when it is closed."""
    loader = Loader(source, workers, pin)
    try:
        yield from loader.batches(groups)
    finally:
        loader.close()


class Loader:
    """Makes batches, in `workers` processes that prepare them ahead, or here when that is 0. `pin` puts tensors into page-locked memory."""

    def __init__(self, source: SampleSource, workers: int, pin: bool) -> None:
        self._source = source
        self._asked = _JobSampler()
        self._stream: Iterator[Batch | _PackedBatch | GigamaskError] = iter(())
        self._torch: Iterable[Batch | _PackedBatch | GigamaskError] = DataLoader(
            _JobDataset(source),
            batch_size=None,
            sampler=self._asked,
            num_workers=workers,
            collate_fn=_as_is,
            worker_init_fn=_leave_signals,
            pin_memory=pin,
            prefetch_factor=PREFETCH if workers else None,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # torch draws a seed for its workers; from here it leaves the global generator alone
        )

    def batches(self, groups: Iterable[StepPlan]) -> Iterator[tuple[Batch, ...]]:
        """Yields each step's micro-batches in order; all of them must have been taken before more are asked for.

        Raises `GigamaskError` when a worker dies, naming it and the samples that were waited for.
        """
        self._asked.groups = groups
        ahead = self._asked.ahead
        made = self._made()
        for first in made:
            yield first, *islice(made, len(ahead[0].micro_batches) - 1)
            ahead.popleft()

    def close(self) -> None:
        """Ends the processes now, also where a traceback still holds the loader."""
        self._stream, self._torch = iter(()), ()

    def _made(self) -> Iterator[Batch]:
        """Yields micro-batches; raises the `GigamaskError` that a worker met, or that one is dead."""
        self._stream = iter(self._torch)
        while True:
            try:
                made = next(self._stream)
            except StopIteration:
                return
            except RuntimeError as error:
                made = self._death(str(error))
                if made is None:
                    raise
            if isinstance(made, GigamaskError):
                raise made
            yield made.unpacked() if isinstance(made, _PackedBatch) else made

    def _death(self, words: str) -> GigamaskError | None:
        """Returns the `GigamaskError` that says which worker is dead; None when torch's words are about something else."""
        # From its own check, or from its handler of SIGCHLD.
        gone = re.match(
            r"DataLoader worker (.*?(?:exited unexpectedly|is killed by signal: [^.]*))", words
        )
        if gone is None or not self._asked.ahead:
            return None
        group = self._asked.ahead[0]
        names = [
            self._source.index.entry_name(visit.row)
            for visits in group.micro_batches
            for visit in visits
        ]
        more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
        return GigamaskError(
            f"the loader worker {gone[1]} while samples from {group.start} on were waited for ({', '.join(names[:NAMES_TOLD])}{more}); often memory "
            "ran out: run the same command again with fewer --loader.workers, training goes on from the last checkpoint"
        )


class _JobSampler:
    """What workers are asked for, step after step, and the steps that were begun but not yet delivered."""

    def __init__(self) -> None:
        self.groups: Iterable[StepPlan] = ()
        self.ahead: deque[StepPlan] = deque()

    def __iter__(self) -> Iterator[BatchJob]:
        self.ahead.clear()
        for group in self.groups:
            self.ahead.append(group)
            for visits in group.micro_batches:
                yield BatchJob(visits, group.start, group.samples)
