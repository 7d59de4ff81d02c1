"""Exponential moving average of the weights, which evaluation and exports use.

The decay is warmed up, so that the random weights of the first steps are soon forgotten. Averages
are kept by the names of the trainable parameters; buffers and frozen parameters are the model's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gigamask.distributed import fsdp


def copy_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the trainable weights by name: the average before the first update."""
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def decay_at(decay: float, step: int) -> float:
    """Return the decay of an update: at most `(1 + step) / (10 + step)`.

    Args:
        decay: Decay after the warm-up.
        step: Number of steps before the update.
    """
    return min(decay, (1 + step) / (10 + step))


@torch.no_grad()
def update(average: dict[str, Tensor], model: nn.Module, decay: float) -> None:
    """Move the average towards the weights; each process moves its shards.

    Args:
        average: The average, changed in place.
        model: The model, sharded as the average is.
        decay: Weight of the old average; that of the model's weights is `1 - decay`.
    """
    pairs = [
        (fsdp.to_local(average[name]), fsdp.to_local(parameter.detach()))
        for name, parameter in model.named_parameters()
        if name in average
    ]
    averages, weights = map(list, zip(*pairs, strict=True))
    torch._foreach_lerp_(averages, weights, 1 - decay)


def by_state_name(average: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the average by every name in the state dict, of which a tied parameter has several.

    Args:
        average: The average.
        model: The model.
    """
    of_parameter = {
        parameter: average[name] for name, parameter in model.named_parameters() if name in average
    }
    return {
        name: of_parameter[parameter]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in of_parameter
    }


@contextmanager
def applied(average: dict[str, Tensor], model: nn.Module) -> Iterator[None]:
    """Give the model the averaged weights; afterwards it has its own again, bit for bit.

    Args:
        average: The average.
        model: The model, which must not be sharded.
    """
    named = {name: p for name, p in model.named_parameters() if name in average}
    weights = {name: parameter.data for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.data = average[name]
    try:
        yield
    finally:
        for name, parameter in named.items():
            parameter.data = weights[name]
