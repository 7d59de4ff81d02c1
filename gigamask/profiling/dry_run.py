"""Dry run of a training step with torch's fake tensors: peak bytes of each phase, without
allocating memory and without a GPU.

Fake tensors are CPU tensors even when planning for a GPU, because autograd of a torch built without
CUDA aborts on fake CUDA tensors. GPU behavior that changes memory is emulated: the attention
kernel, autocast of layer norms, the allocator's block size, and the workspace of flash attention's
backward pass.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable
from weakref import finalize

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gigamask.data.sample_config import SampleConfig
from gigamask.distributed.fsdp import shardable_parameters
from gigamask.distributed.gradient_exchange import GradientExchange
from gigamask.distributed.world import World
from gigamask.interfaces import PromptSchedule, Task
from gigamask.models.sam.attention import attention_for_device
from gigamask.records import DataCursor
from gigamask.types import Batch, LossSums, PromptRound, Prompts, RandomInputs, RandomSpec, Targets

Model = TypeVar("Model", bound=nn.Module)
Device = Literal["cuda", "cpu"]
CUDA_BLOCK_BYTES = 512
"""Allocation granularity of CUDA's caching allocator."""
SCALARS = {
    Tensor.item: 1,
    Tensor.__int__: 1,
    Tensor.__index__: 1,
    Tensor.__float__: 1.0,
    Tensor.__bool__: True,
}
"""Value returned for each way of reading a number from a fake tensor."""
DEVICE = torch.ops.prim.device.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class AllocationTracker(TorchDispatchMode):
    """Track the bytes of all storages created while the mode is active, until they are freed.

    Works for real and for fake tensors. Workspace that an operator frees before it returns is not
    counted.
    """

    def __init__(self, block_bytes: int = 1) -> None:
        """Start at zero bytes; each storage is rounded up to whole blocks of `block_bytes`."""
        super().__init__()
        self.current = self.peak = 0
        self._block_bytes = block_bytes
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE:  # two thirds of all calls with fake tensors
            return args[0].fake_device
        for tensor in tensors_in((args, kwargs)):
            self._track(tensor, created=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._track(tensor, created=True)
        return result

    def take_peak(self) -> int:
        """Return the peak since the last call and reset it to the current bytes."""
        peak, self.peak = self.peak, self.current
        return peak

    def _track(self, tensor: Tensor, created: bool) -> None:
        """Count a new storage; storages created outside the mode count zero bytes."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        blocks = -(-storage.nbytes() // self._block_bytes) if created else 0
        self._sizes[key] = blocks * self._block_bytes
        self.current += self._sizes[key]
        self.peak = max(self.peak, self.current)
        finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


class _CudaTracker(AllocationTracker):
    """Count blocks of CUDA's allocator and the workspace of flash attention's backward pass."""

    def __init__(self) -> None:
        super().__init__(CUDA_BLOCK_BYTES)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is FLASH_BACKWARD and args[1].dtype != torch.float32:
            self.peak = max(self.peak, self.current + _flash_backward_bytes(args[1].shape))
        return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results.

    Args:
        value: A tensor, or lists, tuples and dictionaries of tensors.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))


def _flash_backward_bytes(query_shape: torch.Size) -> int:
    """Return the float32 accumulator of the query gradient, in whole tiles of 128 x 32."""
    batch, heads, tokens, width = query_shape
    return 4 * batch * heads * 128 * math.ceil(tokens / 128) * (32 * math.ceil(width / 32) + 1)


class FakeScalars(TorchFunctionMode):
    """Return ones where Python code reads numbers from fake or meta tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.item and args[0].is_floating_point():
            return 1.0
        if func in SCALARS:
            return SCALARS[func]
        if func is Tensor.numpy and (isinstance(args[0], FakeTensor) or args[0].is_meta):
            return np.ones(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_tensors(device: Device) -> Iterator[AllocationTracker]:
    """Create fake tensors in this context and track the bytes they would hold on `device`."""
    tracker = _CudaTracker() if device == "cuda" else AllocationTracker()
    norms = _float32_norms() if device == "cuda" else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, FakeScalars(), norms:
        yield tracker


@contextlib.contextmanager
def _float32_norms() -> Iterator[None]:
    """Compute layer norms in float32 under autocast, as CUDA does; also in recomputed blocks.

    A `TorchFunctionMode` would be off during a backward pass, which recomputes them.
    """
    layer_norm = functional.layer_norm

    def in_float32(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_half = torch.is_autocast_enabled("cpu")
        return layer_norm(input.float() if is_half else input, *args, **kwargs)

    functional.layer_norm = in_float32
    try:
        yield
    finally:
        functional.layer_norm = layer_norm


def to_fake(model: Model, device: Device) -> Model:
    """Replace a meta-device model's tensors by fake ones, in place; tied parameters stay tied.

    Args:
        model: A model on the meta device.
        device: The device to plan for, which selects the attention kernel.

    Returns:
        The same model.
    """
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = (
                        nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                    )
                tensors[name] = made[tensor]  # pyrefly: ignore[unsupported-operation]
        if use := getattr(module, "use_attention", None):
            use(attention_for_device(device))
    return model


def use_gathered_weights(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Replace the sharded matrices of blocks by copies in `dtype`, whose gradients are not kept.

    This is how FSDP computes in half precision: autocast makes no further copies of the weights.

    Args:
        blocks: The encoder's blocks.
        dtype: The compute precision.
    """
    for block in blocks:
        sharded = shardable_parameters(block)
        for module in block.modules():
            names = [name for name, each in module._parameters.items() if each in sharded]
            for name in names:
                parameter = getattr(module, name)
                fake = torch.empty(parameter.shape, dtype=dtype)
                gathered = nn.Parameter(fake, parameter.requires_grad)
                if gathered.requires_grad:
                    gathered.register_post_accumulate_grad_hook(
                        lambda each: setattr(each, "grad", None)
                    )
                module._parameters[name] = gathered


@runtime_checkable
class MemoryCounter(Protocol):
    """Counter of the current bytes and of the peak since the last `take_peak`."""

    current: int

    def take_peak(self) -> int: ...


class KeptGradients(GradientExchange):
    """The gradients of several processes, which keep their memory; none are sent."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, World())

    def start(self) -> None:
        """Send nothing."""

    def finish(self) -> None:
        """Wait for nothing."""


class PhasePeaks:
    """Peak bytes of each phase of a step, above those held when the step began.

    `forward` encodes the images (in MAE it is the whole forward pass), `rounds` decodes masks and
    back-propagates to the embedding, `backward` goes through the encoder, `update` is the rest.
    """

    def __init__(self, counter: MemoryCounter) -> None:
        self.peaks = dict.fromkeys(("forward", "rounds", "backward", "update"), 0)
        self.activation_bytes = 0
        self._counter, self._phase, self._base = counter, "", 0

    def start(self) -> None:
        """Begin the step, in the phase `forward`."""
        self._base, self._phase = self._counter.current, "forward"
        self._counter.take_peak()

    def enter(self, phase: str) -> None:
        """End the current phase, and begin or continue `phase`."""
        peak = self._counter.take_peak() - self._base
        self.peaks[self._phase] = max(self.peaks[self._phase], peak)
        if self._phase == "forward":
            self.activation_bytes = self._counter.current - self._base
        self._phase = phase


def blank_batch(
    sample_config: SampleConfig, random_spec: RandomSpec, images: int, masks: int
) -> Batch:
    """Return a batch of black images and empty masks with the shapes of the loader's batches.

    No image skips a branch of the encoder.

    Each mask has one RLE bound per four cells of its side.

    Args:
        sample_config: Sizes of images and masks.
        random_spec: How many random inputs there are.
        images: Number of images.
        masks: Number of masks, over all images.
    """
    zeros, side = torch.zeros, sample_config.image_size
    mask_image = torch.arange(masks) // max(1, -(-masks // max(1, images)))
    return Batch(
        names=tuple(str(number) for number in range(images)),
        images=zeros(images, sample_config.pixels.channels, side, side, dtype=torch.uint8),
        input_sizes=torch.full((images, 2), side),
        scale_xy=torch.ones(images, 2),
        batch_index=torch.arange(images),
        weights=torch.ones(images),
        mask_image=mask_image,
        strata=zeros(masks, dtype=torch.int64),
        boxes_input=zeros(masks, 4),
        rle_bounds=zeros(masks * sample_config.mask_size // 4, dtype=torch.int32),
        rle_offsets=zeros(masks + 1, dtype=torch.int64),
        mask_size=sample_config.mask_size,
        random_inputs=RandomInputs(
            first_prompt=zeros(masks),
            clicks=zeros(masks, random_spec.clicks + random_spec.points, 2),
            box_noise=zeros(masks, 4),
            drop_path=torch.ones(images, random_spec.blocks, 2),
            patches=zeros(images, random_spec.patches),
        ),
        mask_only_round_u=0.5,
        cursor=DataCursor(images),
        classes=zeros(masks, dtype=torch.int64) if sample_config.class_names else None,
    )


@dataclass(frozen=True)
class PhaseTask(Task):
    """A task that reports the phases of the step it runs.

    With `accumulated`, earlier chunks of masks have left a gradient on the embedding.
    """

    task: Task
    enter: Callable[[str], None]
    accumulated: bool = False

    def compute_losses(
        self, model: Any, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the losses of the task and report its phases.

        Args:
            model: The model.
            batch: One micro-batch.
            detach: Returns a leaf tensor for the embedding.
        """
        phase = "backward"

        def detach_and_report(embedding: Tensor) -> Tensor:
            nonlocal phase
            leaf = detach(embedding)
            if self.accumulated and leaf.requires_grad:
                leaf.grad = torch.zeros_like(leaf)
            phase = "rounds"
            self.enter(phase)
            return leaf

        for terms in self.task.compute_losses(model, batch, detach_and_report):
            self.enter(phase)
            yield terms
            self.enter(phase)
        self.enter("backward")


class PhaseBatches(tuple[Batch, ...]):
    """Batches of one step that report the phase `update` after the last one."""

    enter: Callable[[str], None]

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        self.enter("update")


@dataclass(frozen=True)
class ShortSchedule(PromptSchedule):
    """The first two rounds and the last one of a prompt schedule.

    The rounds in between differ only by a token or two. `round_counts` receives the number of
    rounds of the whole schedule.
    """

    schedule: PromptSchedule
    round_counts: list[int] = field(default_factory=list)

    @property
    def num_uniforms(self) -> int:
        """Random numbers that the whole schedule uses."""
        return self.schedule.num_uniforms

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return the prompts of the first, the second or the last round, then None.

        Args:
            previous: The previous round, None at the start.
            targets: The masks.
            random_inputs: The random numbers of the batch.
            mask_only_round_u: The uniform number that picks the mask-only round.
        """
        if previous is not None and previous.index > 1:
            return None
        index = 0 if previous is None else previous.index + 1
        prompts = self.schedule.next(previous, targets, random_inputs, mask_only_round_u)
        while previous is not None and prompts is not None and index > 1:
            later = self.schedule.next(
                PromptRound(index, prompts, previous.prediction),
                targets,
                random_inputs,
                mask_only_round_u,
            )
            if later is None:
                break
            prompts, index = later, index + 1
        if prompts is not None:
            self.round_counts.append(index + 1)
        return prompts
