"""Masks and numbers on a GPU without waiting for it, and tensors whose values need no wait.

Run-length encoded masks become dense here, and dense ones run lengths; `masks.rle` needs no torch.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn.functional import pad

from gigamask.masks.coco_rle import check_size
from gigamask.masks.resample import cancel_pairs, offsets_of
from gigamask.masks.rle import RLEMasks, from_keys


def constant(
    values: Sequence[float | int], device: torch.device, dtype: torch.dtype | None = None
) -> Float[Tensor, "n"]:
    """Return numbers on a device, for which `torch.tensor` would wait for a GPU.

    Args:
        values: The numbers.
        device: The device.
        dtype: Their dtype; None is torch's default.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, or in float32 on Apple's GPUs, which lack it."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def is_readable(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting: not on a GPU, of fakes, while traced.

    The fake tensors of a memory plan are CPU tensors also when planning for a GPU, and take the
    GPU's way.

    Args:
        tensor: The tensor.
    """
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return type(tensor) is Tensor and not is_traced and tensor.device.type == "cpu"


class _AutocastOff:
    """Disables the autocast of a kind of device, in a tenth of the time of `torch.autocast`."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self._kind, False)

    def __exit__(self, *exception: object) -> None:
        torch.set_autocast_enabled(self._kind, True)


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Return a context that disables autocast on the device of `tensor`."""
    return autocast_off(tensor.device.type)


def autocast_off(kind: str) -> contextlib.AbstractContextManager:
    """Return a context that disables autocast on a kind of device, such as "cpu"."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    if torch.compiler.is_compiling():
        return torch.autocast(kind, enabled=False)
    return _AutocastOff(kind)


def as_array(values: Any) -> np.ndarray:
    """Return values as an array, those of a tensor from any device and without its gradient.

    Args:
        values: A tensor, an array, or numbers that make one.
    """
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def decode_rle(
    bounds: Int[Tensor, "T"], offsets: Int64[Tensor, "n1"], size: tuple[int, int]
) -> Bool[Tensor, "n H W"]:
    """Decode masks on their device.

    A pixel is foreground if the number of bounds up to it is odd.

    Args:
        bounds: Change points of all masks, as in `RLEMasks`.
        offsets: Start of each mask's bounds, followed by the end of the last.
        size: Size of the masks, (H, W).

    Returns:
        The masks as a transposed view, because runs are column-major.
    """
    height, width = size
    pixels, count = height * width, len(offsets) - 1
    masks_at_once = max((2**31 - 1) // pixels, 1)
    owner = torch.repeat_interleave(
        torch.arange(count, device=bounds.device), offsets.diff(), output_size=len(bounds)
    )
    marks = torch.zeros(count, pixels, dtype=torch.int8, device=bounds.device)
    marks[owner, bounds.long()] = 1
    # int8 wraps around, which keeps the parity. A cumsum of more than 2**31 - 1 numbers would
    # exceed int32 indices.
    for part in marks.split(masks_at_once):
        torch.cumsum(part, 1, dtype=torch.int8, out=part)
    return marks.bitwise_and_(1).view(torch.bool).view(count, width, height).transpose(1, 2)


def encode_boxes(
    stacks: Sequence[tuple[Bool[Tensor, "_ _ _"], Int[np.ndarray, "_ 2"]]], size: tuple[int, int]
) -> RLEMasks:
    """Encode masks that are given within boxes, on their device, by one search for all changes.

    Args:
        stacks: The pixels in the boxes of masks, those of one stack of the same size, and the
            first row and column of each box.
        size: Size of the masks, (H, W).
    """
    height, pixels = size[0], check_size(size)
    if not stacks:
        return from_keys(size, 0, np.zeros(0, np.int64), pixels)
    # Background above and below, so that a run ends with its column; ends at a start cancel below.
    padded = [pad(masks, (0, 0, 1, 1)) for masks, _ in stacks]
    flat = torch.cat([(each[:, 1:] != each[:, :-1]).flatten() for each in padded])
    # NumPy's search takes a tenth of the time of torch's on a CPU.
    found = (
        np.flatnonzero(flat.numpy())
        if flat.device.type == "cpu"
        else flat.nonzero()[:, 0].cpu().numpy()
    )
    corners = np.concatenate([corner for _, corner in stacks])
    shapes = np.concatenate([np.tile(masks.shape[1:], (len(masks), 1)) for masks, _ in stacks])
    offsets = offsets_of((shapes[:, 0] + 1) * shapes[:, 1])
    owner = np.searchsorted(offsets, found, "right") - 1
    y, x = np.divmod(found - offsets[owner], shapes[owner, 1])
    keys = (x + corners[owner, 1]) * height + y + corners[owner, 0] + owner * (pixels + 1)
    return from_keys(size, len(corners), cancel_pairs(np.sort(keys)), pixels + 1)
