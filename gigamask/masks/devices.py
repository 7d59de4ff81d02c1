"""Numbers on a GPU without waiting for it, and tensors whose values need no wait."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


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


def is_readable(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting: not on a GPU, of fakes, in a compiler.

    The fake tensors of a memory plan are CPU tensors also when planning for a GPU, and take the
    GPU's way.

    Args:
        tensor: The tensor.
    """
    is_real = type(tensor) is Tensor and not torch.compiler.is_compiling()
    return is_real and tensor.device.type == "cpu"


def as_array(values: Any) -> np.ndarray:
    """Return values as an array, those of a tensor from any device and without its gradient.

    Args:
        values: A tensor, an array, or numbers that make one.
    """
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
