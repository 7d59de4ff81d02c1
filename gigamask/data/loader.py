"""Batches of an index, built in this process or in worker processes.

The loader has no state: batches are a function of the step plans alone, regardless of the number of
workers. Masks are sent as run lengths on the target grid, a few hundred bytes each, and decoded on
the device.
"""

import math
import multiprocessing.connection
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from gigamask.data.dataset import RawSample, Sa1bDataset, build_sample
from gigamask.data.index import Index
from gigamask.data.sample_config import SampleConfig
from gigamask.data.worker_pool import stop_signals_blocked
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.files import check_file_limit
from gigamask.masks.rle import RLEMasks
from gigamask.records import DataCursor, ImageAnnotation, SampleRef, SkippedSample, StepPlan
from gigamask.rng import make_rng
from gigamask.signals import STOP_SIGNALS
from gigamask.types import Batch, RandomInputs, RandomSpec, Sample

if TYPE_CHECKING:
    from gigamask.data.mask_store import MaskStore

PREFETCH = 2
"""Micro-batches that each worker prepares ahead."""
MAX_NAMES = 8
"""Maximum number of sample names in an error message."""
DYING_S = 0.5
"""Seconds in which a worker that closed its sockets ends."""
Result = TypeVar("Result")


class BatchJob(NamedTuple):
    """One micro-batch of a step, as a worker receives it.

    `samples_before` and `samples_after` count the samples that all ranks consumed before and after
    the step.
    """

    refs: tuple[SampleRef, ...]
    samples_before: int
    samples_after: int


@dataclass(frozen=True)
class SampleSource:
    """Samples of the index in `folder`.

    It may be pickled: each process opens the index and tars when it first reads them. `read_ahead`
    is the size in bytes of the blocks in which remote tars are fetched, of which `blocks` are
    cached; 0 fetches exactly the requested bytes.
    """

    folder: str
    sample_config: SampleConfig
    random_spec: RandomSpec
    read_ahead: int = 0
    blocks: int = 4

    @cached_property
    def index(self) -> Index:
        """The opened index."""
        return Index.open(self.folder)

    @cached_property
    def dataset(self) -> Sa1bDataset:
        """The dataset over the index."""
        return Sa1bDataset(self.index, self.read_ahead, self.blocks)

    @cached_property
    def _masks(self) -> "MaskStore | None":
        if not self.sample_config.mask_store:
            return None
        from gigamask.data.mask_store import MaskStore

        return MaskStore.open(self.sample_config.mask_store, self.index)

    def sample(self, ref: SampleRef, raw: RawSample | CorruptSampleError | None = None) -> Sample:
        """Read, check and build one sample.

        Args:
            ref: Position in the sequence of samples, and the row of the index.
            raw: The bytes, if they have been read already.

        Raises:
            CorruptSampleError: The sample cannot be used.
        """
        if raw is None:
            [raw] = self._read([ref])
        if isinstance(raw, CorruptSampleError):
            raise raw
        if self._masks is not None:
            return self._masks.sample(raw.jpg, ref, self.sample_config, self.random_spec)
        entry = (
            raw.annotation()
            if self.sample_config.with_masks
            else self._empty_annotation(ref.row, raw.name)
        )
        return build_sample(raw.jpg, entry, ref, self.sample_config, self.random_spec)

    def batch(self, job: BatchJob) -> Batch:
        """Build one micro-batch; corrupt samples are left out and listed in `Batch.skipped`."""
        samples, skipped = [], []
        for ref, raw in zip(job.refs, self._read(job.refs), strict=True):
            try:
                samples.append(self.sample(ref, raw))
            except CorruptSampleError as error:
                skipped.append(SkippedSample(self.index.entry_name(ref.row), str(error)))
        spec = self.random_spec
        batch = collate(
            samples,
            tuple(skipped),
            self.sample_config,
            spec,
            float(make_rng(spec.seed, "pause", job.samples_before).random()),
            DataCursor(job.samples_after),
        )
        if spec.drop_path_mode != "batch":
            return batch
        drawn = spec.draw_drop_path(make_rng(spec.seed, "drop_path of a step", job.samples_before))
        drop_path = torch.from_numpy(drawn.repeat(len(samples), 0))
        return replace(batch, random_inputs=replace(batch.random_inputs, drop_path=drop_path))

    def _read(self, refs: Sequence[SampleRef]) -> list[RawSample | CorruptSampleError]:
        """Read the bytes of several samples together; jsons only if they are used."""
        with_json = self.sample_config.with_masks and self._masks is None
        return self.dataset.read_many([ref.row for ref in refs], with_json)

    def _empty_annotation(self, row: int, name: str) -> ImageAnnotation:
        """Return an annotation of an image that has no masks."""
        images, scores = self.index.images, np.zeros(0, np.float32)
        size = (int(images["height"][row]), int(images["width"][row]))
        masks = RLEMasks.from_coco([], size)
        return ImageAnnotation(name, size, masks, scores, scores)

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


def collate(
    samples: list[Sample],
    skipped: tuple[SkippedSample, ...],
    config: SampleConfig,
    random_spec: RandomSpec,
    mask_only_round_u: float,
    cursor: DataCursor,
) -> Batch:
    """Join samples into one batch, with all masks on one flat axis.

    Args:
        samples: Samples, possibly none, each with any number of masks.
        skipped: Samples that were skipped, with the reasons.
        config: Image size and mask size.
        random_spec: Counts of the random numbers drawn per sample.
        mask_only_round_u: Uniform number in [0, 1) that selects the mask-only round of the step.
        cursor: Samples consumed after training on the batch.
    """
    image_size, mask_size = config.image_size, config.mask_size
    channels = config.pixels.channels
    images = _shared_zeros((len(samples), channels, image_size, image_size))
    for image, sample in zip(images, samples, strict=True):
        height, width = sample.image.shape[1:]
        image[:, :height, :width] = sample.image
    no_masks = RLEMasks.from_coco([], (mask_size, mask_size))
    masks = RLEMasks.concatenate([no_masks, *(sample.masks for sample in samples)])
    counts = torch.tensor([len(sample.masks) for sample in samples], dtype=torch.int64)
    boxes = np.concatenate(
        [np.zeros((0, 4), np.float32), *(sample.boxes_input for sample in samples)]
    )
    empty_shapes = (
        (0,),
        (0, random_spec.clicks + random_spec.points, 2),
        (0, 4),
        (0, random_spec.blocks, 2),
        (0, random_spec.patches),
    )
    empty = RandomInputs(*map(torch.zeros, empty_shapes))
    random_inputs = [empty, *(sample.random_inputs for sample in samples)]
    return Batch(
        names=tuple(sample.name for sample in samples),
        images=images,
        input_sizes=torch.tensor(
            [sample.transform.resized for sample in samples], dtype=torch.int64
        ).reshape(-1, 2),
        scale_xy=torch.tensor(
            [sample.transform.scale_xy for sample in samples], dtype=torch.float32
        ).reshape(-1, 2),
        batch_index=torch.tensor([sample.ref.batch_index for sample in samples], dtype=torch.int64),
        weights=torch.tensor([sample.ref.weight for sample in samples], dtype=torch.float32),
        mask_image=torch.repeat_interleave(counts),
        strata=torch.from_numpy(
            np.concatenate([np.zeros(0, np.int64), *(sample.strata for sample in samples)])
        ),
        boxes_input=torch.from_numpy(boxes),
        rle_bounds=torch.from_numpy(masks.bounds),
        rle_offsets=torch.from_numpy(masks.offsets),
        mask_size=mask_size,
        random_inputs=RandomInputs(
            **{
                field.name: torch.cat([getattr(inputs, field.name) for inputs in random_inputs])
                for field in fields(RandomInputs)
            }
        ),
        mask_only_round_u=mask_only_round_u,
        cursor=cursor,
        skipped=skipped,
        classes=_collate_classes(samples) if config.class_names else None,
    )


def _collate_classes(samples: list[Sample]) -> Int64[Tensor, "M"]:
    classes = [sample.classes for sample in samples if sample.classes is not None]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *classes]))


SHARED_MEMORY = "/dev/shm"


def _shared_zeros(shape: tuple[int, ...]) -> UInt8[Tensor, "..."]:
    """Return zeros; in a worker, in shared memory, as torch's default collate function does."""
    size = math.prod(shape)
    if get_worker_info() is None or not size:
        return torch.zeros(shape, dtype=torch.uint8)
    try:
        shared = torch.UntypedStorage._new_shared(size)
    except RuntimeError as error:
        check_file_limit(error)
        if "No space left" not in str(error):
            raise
        raise GigamaskError(
            f"{SHARED_MEMORY}: has no room for the {size:,} bytes of a batch's images; enlarge it "
            "(docker run --shm-size 8g), or use --loader.workers 0"
        ) from error
    return torch.empty(0, dtype=torch.uint8).set_(shared).view(shape)


@dataclass(frozen=True)
class _PackedBatch:
    """A batch as a worker sends it: images in shared memory, other tensors as arrays.

    Each tensor sent needs a shared-memory file of its own, which costs more than its content.
    """

    images: UInt8[Tensor, "B N S S"]
    random_inputs: dict[str, np.ndarray]
    rest: dict[str, Any]

    @classmethod
    def pack(cls, batch: Batch) -> "_PackedBatch":
        rest = {field.name: getattr(batch, field.name) for field in fields(Batch)}
        random_inputs = {
            field.name: getattr(batch.random_inputs, field.name).numpy()
            for field in fields(RandomInputs)
        }
        images = rest.pop("images")
        del rest["random_inputs"]
        return cls(
            images,
            random_inputs,
            {
                name: value.numpy() if isinstance(value, Tensor) else value
                for name, value in rest.items()
            },
        )

    def unpack(self) -> Batch:
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
        """Return the batch in pinned memory; torch's DataLoader calls this."""
        return self.unpack().pin_memory()


class _JobDataset(Dataset):
    """Dataset of micro-batches; returns `GigamaskError`s so that torch adds no traceback."""

    def __init__(self, source: SampleSource) -> None:
        self.source = source

    def __getitem__(self, index: BatchJob) -> Batch | _PackedBatch | GigamaskError:
        try:
            batch = self.source.batch(index)
        except GigamaskError as error:
            return error
        return batch if get_worker_info() is None else _PackedBatch.pack(batch)


def _identity(batch: Any) -> Any:
    return batch


def _ignore_signals(worker: int) -> None:
    """Ignore the stop signals in a worker.

    Terminals and batch systems signal all processes, but the training process needs its workers to
    finish its step, and stops them afterwards.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def batches(
    source: SampleSource, plans: Iterable[StepPlan], workers: int = 0, pin: bool = False
) -> Iterator[tuple[Batch, ...]]:
    """Yield each step's micro-batches in order, and stop the workers when closed.

    Args:
        source: Source of the samples.
        plans: Samples of each step.
        workers: Number of worker processes; 0 builds batches in this process.
        pin: Whether to put tensors into pinned memory.
    """
    loader = Loader(source, workers, pin)
    try:
        yield from loader.batches(plans)
    finally:
        loader.close()


class Loader:
    """Loader of batches; its worker processes persist across calls of `batches`.

    Args:
        source: Source of the samples.
        workers: Number of worker processes, which prepare batches ahead; 0 builds them in this
            process.
        pin: Whether to put tensors into pinned memory.
    """

    def __init__(self, source: SampleSource, workers: int, pin: bool) -> None:
        self._source = source
        self._jobs, self._workers = _JobSampler(), _Workers(self._dead_worker_error)
        self._stream: Iterator[Batch | _PackedBatch | GigamaskError] = iter(())
        self._loader: Iterable[Batch | _PackedBatch | GigamaskError] = DataLoader(
            _JobDataset(source),
            batch_size=None,
            sampler=self._jobs,
            num_workers=workers,
            collate_fn=_identity,
            worker_init_fn=_ignore_signals,
            pin_memory=pin,
            prefetch_factor=PREFETCH if workers else None,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # or torch would seed workers from the global one
        )

    def batches(self, plans: Iterable[StepPlan]) -> Iterator[tuple[Batch, ...]]:
        """Yield each step's micro-batches in order; exhaust the iterator before the next call.

        Args:
            plans: Samples of each step.

        Raises:
            GigamaskError: A worker died; the message names the samples that were being loaded.
        """
        self._jobs.plans = plans
        pending = self._jobs.pending
        micro_batches = self._micro_batches()
        for first in micro_batches:
            yield first, *islice(micro_batches, len(pending[0].micro_batches) - 1)
            pending.popleft()

    def close(self) -> None:
        """Stop the worker processes now, even if a traceback still refers to the loader."""
        self._stream, self._loader = iter(()), ()
        self._workers.stop()

    def _micro_batches(self) -> Iterator[Batch]:
        """Yield micro-batches; raise a worker's `GigamaskError`, or one that reports its death."""
        wait = self._workers.wait
        self._stream = wait(lambda: self._workers.start(self._loader))
        while (result := wait(lambda: next(self._stream, None))) is not None:
            if isinstance(result, GigamaskError):
                raise result
            yield result.unpack() if isinstance(result, _PackedBatch) else result

    def _dead_worker_error(self, reason: str) -> GigamaskError:
        """Return the error about a dead worker, given its exit code or another reason."""
        samples = ""
        if self._jobs.pending:
            plan = self._jobs.pending[0]
            rows = [ref.row for refs in plan.micro_batches for ref in refs]
            names = [self._source.index.entry_name(row) for row in rows[:MAX_NAMES]]
            more = f" and {len(rows) - MAX_NAMES} more" if len(rows) > MAX_NAMES else ""
            samples = (
                f" while samples from {plan.samples_before} on were being loaded "
                f"({', '.join(names)}{more})"
            )
        cause, fewer = "often for lack of memory", " with fewer --loader.workers"
        if reason.startswith("exit code") and "-" not in reason:  # it was not killed
            cause, fewer = "for an error that is printed above", ""
        return GigamaskError(
            f"a loader worker died ({reason}){samples}, {cause}; run the same command again"
            f"{fewer} to continue from the last checkpoint"
        )


class _Workers:
    """The worker processes of a loader, whose deaths are reported only while it waits for them.

    Torch's handler of SIGCHLD raises wherever the main thread is, such as in a backward pass or
    while a checkpoint is saved.
    """

    def __init__(self, explain: Callable[[str], GigamaskError]) -> None:
        self._explain = explain
        self._processes: set[multiprocessing.process.BaseProcess] = set()
        self._waiting = False
        self._handler_before: Any = None

    def start(self, loader: Iterable[Result]) -> Iterator[Result]:
        """Return an iterator, which starts the processes if they are not running yet."""
        others = set(multiprocessing.active_children())
        try:
            with stop_signals_blocked():
                stream = iter(loader)
        finally:
            children = set(multiprocessing.active_children()) - others
            self._processes |= {process for process in children if process.daemon}
        before = signal.getsignal(signal.SIGCHLD)  # torch's, or that of another open loader
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and callable(before) and self._handler_before is None:
            self._handler_before = before
            signal.signal(signal.SIGCHLD, self._handle)
        return stream

    def stop(self) -> None:
        """Kill processes that torch failed to start or to stop, and restore its handler."""
        for process in self._processes:
            process.kill()
            process.join()
        if self._handler_before and signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._handler_before)

    def wait(self, function: Callable[[], Result]) -> Result:
        """Call a function that waits for workers.

        Raises:
            GigamaskError: A worker died before or dies meanwhile.
        """
        try:
            self._waiting = True
            reason = self._death()
            if not reason:
                return function()
        except (RuntimeError, OSError, EOFError) as error:  # OSError: a dead worker's socket
            message = str(error).strip(" .")
            reason = self._death(DYING_S) or message
            if reason == message and not message.startswith("DataLoader worker"):
                raise
        finally:
            self._waiting = False
        # Not while torch's error is handled: its traceback would keep the other workers alive.
        raise self._explain(reason)

    def _death(self, timeout_s: float = 0.0) -> str:
        """Return the exit codes of dead workers, once there is one; empty after the given time."""
        multiprocessing.connection.wait([each.sentinel for each in self._processes], timeout_s)
        dead = [process.exitcode for process in self._processes if not process.is_alive()]
        return f"exit code {', '.join(map(str, dead))}" if dead else ""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            self._handler_before(number, frame)
        if self._waiting and self._death():
            raise RuntimeError("a loader worker is dead")


class _JobSampler:
    """Sampler of jobs for the workers; `pending` are the steps begun but not yet yielded."""

    def __init__(self) -> None:
        self.plans: Iterable[StepPlan] = ()
        self.pending: deque[StepPlan] = deque()

    def __iter__(self) -> Iterator[BatchJob]:
        self.pending.clear()
        for plan in self.plans:
            self.pending.append(plan)
            for refs in plan.micro_batches:
                yield BatchJob(refs, plan.samples_before, plan.samples_after)
