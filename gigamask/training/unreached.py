"""Parameters that have had no gradient so far, such as those of mask prompts with boxes alone.

Torch's optimizers leave out a parameter without a gradient; with one of zeros, which the processes
of a run can sum, they would decay it. So it gets back its value, unless it has had a gradient in
any earlier step, micro-batch or process: which of them had one changes nothing then. Which
parameters they are is saved, so that a resumed run goes on alike.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from zlib import crc32

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.distributed import fsdp
from gigamask.masks.devices import constant
from gigamask.training.config import TrainConfig


def reaching_settings(config: TrainConfig) -> str:
    """Return a digest of the settings of a training that decide which parameters have gradients.

    They may change when a run is resumed.
    """
    settings = [getattr(config, name, None) for name in ("prompts", "loss")]
    return f"{crc32(repr(settings).encode()):08x}"


@dataclass(eq=False)
class Unreached:
    """The parameters that have had no gradient in this process, and in any process.

    Attributes:
        here: Those without one in this process, a superset of those without one in all.
        anywhere: For each trained parameter, above 0 if it has had one in another process, on the
            device; None with one process.
    """

    here: set[nn.Parameter] = field(default_factory=set)
    anywhere: Float[Tensor, "parameters"] | None = None

    def note(self, lacking: Collection[Tensor]) -> None:
        """Note the parameters that a step has given no gradient in this process."""
        self.here.intersection_update(lacking)

    def flags(
        self, parameters: Sequence[nn.Parameter], like: Tensor
    ) -> Float[Tensor, "parameters"]:
        """Return 1 for each parameter that has had a gradient in this process, else 0.

        Args:
            parameters: All trained parameters.
            like: A tensor with the device and type of the result.
        """
        values = [float(parameter not in self.here) for parameter in parameters]
        return constant(values, like.device, like.dtype)

    def add_flags(self, *sums: Float[Tensor, "parameters"]) -> None:
        """Add flags that were summed over all processes, if there are several."""
        for each in sums:
            self.anywhere = each if self.anywhere is None else torch.maximum(self.anywhere, each)

    @contextmanager
    def unchanged(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Undo, without waiting for the device, what an update does to those without a gradient.

        Args:
            parameters: All trained parameters.
        """
        held = [i for i, p in enumerate(parameters) if p in self.here]
        now = [fsdp.to_local(parameters[i]).detach() for i in held]
        before = now and torch._foreach_mul(now, 1)
        yield
        if self.anywhere is not None:
            before = [
                torch.where(self.anywhere[i] > 0, p, old)
                for i, p, old in zip(held, now, before, strict=True)
            ]
        if held:
            torch._foreach_copy_(now, before)

    def everywhere(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that have had no gradient in any process.

        Args:
            parameters: All trained parameters.
        """
        had = [0] * len(parameters) if self.anywhere is None else self.anywhere.tolist()
        return [p for p, n in zip(parameters, had, strict=True) if p in self.here and n <= 0]
