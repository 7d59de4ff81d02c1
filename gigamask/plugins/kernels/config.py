"""`--kernels triton`: what it needs, and the modules of a model that compute with the kernels.

Imports neither torch nor Triton, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gigamask.errors import GigamaskError
from gigamask.interfaces import Kernels, Task
from gigamask.models.configs import SamDecoder

if TYPE_CHECKING:
    from gigamask.training.sam_config import SamTrainConfig


@dataclass(frozen=True)
class TritonKernels(Kernels):
    """Fused Triton kernels for SAM's rounds and encoder attention (docs/plugins/kernels)."""

    def check(self, config: SamTrainConfig) -> None:
        """Check that the kernels can be used.

        Args:
            config: The training.

        Raises:
            GigamaskError: They cannot.
        """
        if find_spec("triton") is None:
            raise GigamaskError(
                "--kernels triton: the package triton is not installed; run "
                "pip install 'gigamask[kernels]', or leave the flag out"
            )
        if config.model.decoder != SamDecoder():
            raise GigamaskError(
                "--kernels triton is for SAM's mask decoder "
                f"(got {type(config.model.decoder).__name__}); leave the flag out"
            )
        if config.compile:
            raise GigamaskError(
                "--kernels triton takes the place of --compile; leave one of the flags out"
            )
        if config.command != "train":
            raise GigamaskError("--kernels triton is for 'gigamask train'; leave the flag out")

    def check_device(self, device: str) -> None:
        """Check, before a training starts, that its device runs the kernels.

        Args:
            device: Value of --device.

        Raises:
            GigamaskError: It does not.
        """
        from triton import knobs

        from gigamask.distributed.precision import choose_device

        if choose_device(device).type != "cuda" and not knobs.runtime.interpret:
            raise GigamaskError(
                f"--kernels triton needs a GPU (got --device {device}); to run the kernels on a "
                "CPU in Triton's interpreter, which is slow, set TRITON_INTERPRET=1"
            )

    @contextmanager
    def used(self, task: Task, model: Any) -> Iterator[Task]:
        """Yield a task whose loss and clicks use the kernels, as encoder and decoder do within it.

        Evaluations within it use none: their precision may be another, which kernels do not have.

        Args:
            task: The task.
            model: The model.

        Raises:
            GigamaskError: The model has another decoder than SAM's, or the device or precision is
                not one of the kernels'.
        """
        from gigamask.plugins.kernels.decoder import fused_methods
        from gigamask.plugins.kernels.encoder import fused_blocks
        from gigamask.plugins.kernels.mask_loss import fused_loss
        from gigamask.plugins.kernels.next_click import fused_schedule

        sam: Any = task
        methods = [*fused_methods(model, sam.precision), *fused_blocks(model)]
        for module, name, fused in methods:
            setattr(module, name, _in_training(model, getattr(module, name), fused))
        try:
            yield replace(sam, loss=fused_loss(sam.loss), schedule=fused_schedule(sam.schedule))
        finally:
            for module, name, _ in methods:
                delattr(module, name)


def _in_training(model: Any, eager: Callable[..., Any], fused: Callable[..., Any]) -> Any:
    """Return a method that is fused while the model is in training mode."""
    return lambda *args, **options: (fused if model.training else eager)(*args, **options)
