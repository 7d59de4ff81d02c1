"""The number format the model computes in; weights, gradients and losses are always float32.

Not here: the casts inside losses, which ask for float32 themselves (`losses.mask`).
"""

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch

from gigamask.errors import GigamaskError

Precision = Literal["fp32", "bf16", "fp16"]
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Returns the device a run asks for; "auto" is cuda when there is one. Raises `GigamaskError` for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise GigamaskError(
            f"--device is {name!r}, known are auto, cpu, cuda and cuda:N; leave it out to take a GPU when there is one"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GigamaskError(
            f"--device is {name!r}, torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here; leave it out, or give cpu"
        )
    return device


def choose_precision(
    name: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device
) -> Precision:
    """Returns the precision a run asks for; "auto" is bf16 on a GPU and fp32 on a CPU."""
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return name


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager:
    """Returns the context in which the model runs: autocast to half the width, or nothing."""
    if precision in HALVES:
        return torch.autocast(device.type, dtype=HALVES[precision])
    return contextlib.nullcontext()


@dataclass
class LossScaler:
    """What fp16's losses are multiplied by, so that small gradients do not vanish: halved where a gradient overflows, doubled when long none did.

    All processes hold the same, since they see the same sum of gradients. Numbers: `torch.amp.GradScaler`'s.
    """

    value: float = 2.0**16
    good: int = 0
    """updates since it changed"""

    PATIENCE = 2000

    def note(self, finite: bool) -> None:
        """Takes whether an update's gradient was finite."""
        self.good += 1
        if not finite:
            self.value, self.good = self.value / 2, 0
        elif self.good == self.PATIENCE:
            self.value, self.good = self.value * 2, 0
