"""Device and precision of the forward pass; weights, gradients and losses are float32."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from gigamask.errors import GigamaskError, check_choice, counted
from gigamask.masks.devices import autocast_off

Precision = Literal["fp32", "bf16", "fp16"]
PrecisionName = Literal["auto", "fp32", "bf16", "fp16"]
TrainingPrecision = Literal["auto", "fastest", "fp32", "bf16", "fp16"]
HALF_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(name: str) -> torch.device:
    """Return the device for a name; "auto" is cuda if there is a GPU, else cpu.

    Raises:
        GigamaskError: There is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise GigamaskError(
            f"--device must be auto, cpu, cuda, cuda:N or mps (got {name!r}); "
            + f"perhaps cuda:{name}; " * str(name).isdigit()
            + "leave it out to use a GPU if there is one"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GigamaskError(
            f"--device {name}: torch {torch.__version__} finds {torch.cuda.device_count()} GPUs; "
            "leave the flag out, or use --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise GigamaskError(
            f"--device {name}: torch {torch.__version__} finds no GPU of Apple's here; leave the "
            "flag out, or use --device cpu"
        )
    return device


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_device(device: torch.device) -> str:
    """Return a device with its number of threads, such as "cpu, 2 threads"."""
    threads = f", {counted(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    return device_name(device) + threads


def choose_precision(name: TrainingPrecision, device: torch.device) -> Precision:
    """Return the precision to compute in.

    Args:
        name: Value of --precision; "auto" is bf16 on a GPU and fp32 on a CPU, and "fastest" is bf16
            also on a CPU that multiplies it in hardware.
        device: Device to compute on.

    Raises:
        GigamaskError: There is no such precision.
    """
    check_choice("precision", name, get_args(TrainingPrecision))
    if name not in ("auto", "fastest"):
        return name
    is_fast = device.type == "cuda" or (name == "fastest" and multiplies_bf16(device))
    return "bf16" if is_fast else "fp32"


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a CPU has instructions that multiply matrices of bfloat16 (AMX)."""
    if device.type != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # older torch
        return False
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def prediction_autocast(
    name: PrecisionName, device: torch.device
) -> contextlib.AbstractContextManager:
    """Return the context for predictions; "auto" leaves an autocast of the caller as it is.

    Args:
        name: Value of --precision.
        device: Device of the model.
    """
    if name == "auto" and torch.is_autocast_enabled(device.type):
        return contextlib.nullcontext()
    return autocast(choose_precision(name, device), device)


def computed_dtype(device: torch.device) -> str:
    """Return the name of the dtype that the autocast of a device computes in, or torch.float32."""
    enabled = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type) if enabled else torch.float32)


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager:
    """Return the context for the forward pass: autocast, or in fp32 none, also not the caller's.

    Args:
        precision: Precision of the model.
        device: Device of the model.
    """
    if precision in HALF_DTYPES:
        return torch.autocast(device.type, dtype=HALF_DTYPES[precision])
    return autocast_off(device.type)


@contextlib.contextmanager
def training_defaults(device: torch.device) -> Iterator[None]:
    """Leave the modes and defaults that a program has set, such as no gradients, in the context.

    Args:
        device: Device of the model.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    is_cpu = torch.get_default_device().type == "cpu"
    place = contextlib.nullcontext() if is_cpu else torch.device("cpu")
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast_off(device.type), place:
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32 within the context.

    Args:
        tf32: Whether it may; else products are as torch is set to compute them.
    """
    before = torch.get_float32_matmul_precision()
    if tf32:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class LossScaler:
    """Dynamic scale of fp16 losses, so that small gradients do not underflow.

    It is halved after an overflow and doubled after 2,000 steps without one, as in
    `torch.amp.GradScaler`. All processes hold the same scale, since they see the same summed
    gradients.
    """

    value: float = 2.0**16
    growth_tracker: int = 0
    """steps since the scale changed"""

    growth_interval = 2000

    def update(self, finite: bool) -> None:
        """Update the scale after a step, given whether its gradients were finite."""
        self.growth_tracker += 1
        if not finite:
            self.value, self.growth_tracker = self.value / 2, 0
        elif self.growth_tracker == self.growth_interval:
            self.value, self.growth_tracker = self.value * 2, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state, as the manifest of a checkpoint stores it."""
        return {"value": self.value, "good": self.growth_tracker}
