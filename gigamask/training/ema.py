"""Exponential moving average of the weights, which evaluation and exports use.

The decay is warmed up, so that the random weights of the first steps are soon forgotten. Averages
are kept by the names of the trainable parameters; buffers and frozen parameters are the model's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gigamask.distributed import fsdp


class Average(dict[str, Tensor]):
    """The running average of the trainable weights of a model, by name."""

    @classmethod
    def of(cls, model: nn.Module) -> "Average":
        """Return a copy of the trainable weights: the average before the first update."""
        return cls(
            {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        )

    @torch.no_grad()
    def follow(self, model: nn.Module, decay: float, step: int) -> None:
        """Move towards the weights; each process moves its shards.

        The decay of an update is at most `(1 + step) / (10 + step)`.

        Args:
            model: The model, sharded as the average is.
            decay: Weight of the old average after the warm-up; the weights have the rest.
            step: Number of steps before the update.
        """
        pairs = [
            (fsdp.to_local(self[name]), fsdp.to_local(parameter.detach()))
            for name, parameter in model.named_parameters()
            if name in self
        ]
        averages, weights = map(list, zip(*pairs, strict=True))
        torch._foreach_lerp_(averages, weights, 1 - min(decay, (1 + step) / (10 + step)))

    def by_state_name(self, model: nn.Module) -> dict[str, Tensor]:
        """Return it by every name in the state dict, of which a tied parameter has several.

        Args:
            model: The model.
        """
        of_parameter = {
            parameter: self[name] for name, parameter in model.named_parameters() if name in self
        }
        return {
            name: of_parameter[parameter]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in of_parameter
        }

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights; afterwards it has its own again, bit for bit.

        Args:
            model: The model, which must not be sharded.
        """
        named = {name: p for name, p in model.named_parameters() if name in self}
        weights = {name: parameter.data for name, parameter in named.items()}
        for name, parameter in named.items():
            parameter.data = self[name]
        try:
            yield
        finally:
            for name, parameter in named.items():
                parameter.data = weights[name]
