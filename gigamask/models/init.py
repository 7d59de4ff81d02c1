"""Initialization of models: reproducible, from weights, and the custom one of small models.

A small model trained for minutes from the standard initialization learns to draw blobs around its
prompts and to ignore the image: image content is noise to a decoder that cannot locate prompts yet,
so the encoder collapses to a constant embedding. The custom initialization provides what the model
would have to learn first: attention to prompt positions, an embedding that separates colors, and
masks that follow similarity.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gigamask.models.configs import ModelConfig
from gigamask.models.model import Model

ModelT = TypeVar("ModelT", bound=Model)


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Any:
    """Build a model with random weights.

    Args:
        config: Configuration of the model.
        seed: Random seed of the weights.
        device: Device of the model; on the meta device it has no storage.
    """
    return materialize(config.build, seed, device)


def materialize(
    make: Callable[[], ModelT], seed: int, device: torch.device | str = "cpu"
) -> ModelT:
    """Build a model and initialize it from a seed.

    Args:
        make: Builds the model; called on the meta device.
        seed: Seed of the initial values.
        device: Device of the model; on the meta device it has no storage.
    """
    with torch.device("meta"):
        model = make()
    if torch.device(device).type == "meta":
        return model
    model.to_empty(device="cpu")
    model.init_weights(seed)
    return model.to(device)


def allocate(model: ModelT, device: torch.device) -> ModelT:
    """Give a model on the meta device storage, and values only to buffers that are not saved.

    Args:
        model: The model, whose weights are loaded next.
        device: Its new device.
    """
    saved = model.state_dict().keys()
    model.to_empty(device=device).init_weights(0, saved)
    return model
