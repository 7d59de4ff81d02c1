"""The number format the model computes in; weights, gradients and losses are always float32.

Not here: the casts inside losses, which ask for float32 themselves (`losses.mask`).
"""

import contextlib
from typing import Literal

import torch


def choose_device(name: str) -> torch.device:
    """Returns the device a run asks for; "auto" is cuda when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """Returns the precision a run asks for; "auto" is bf16 on a GPU and fp32 on a CPU."""
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return name


def casting(precision: Literal["fp32", "bf16"], device: torch.device) -> contextlib.AbstractContextManager:
    """Returns the context in which the model runs: bf16 autocast, or nothing."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
