"""A small model with random weights, and pictures of several sizes."""

import numpy as np
import pytest
import torch

from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from tests.little import SPEC


@pytest.fixture
def model() -> Sam:
    """A model of 64 px whose biases are not zero, so that masks have some shape."""
    made, chance = build_model(SPEC, 0).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=chance))
    return made


@pytest.fixture
def pictures() -> list[np.ndarray]:
    chance = np.random.default_rng(3)
    return [
        chance.integers(0, 256, (*size, 3), dtype=np.uint8)
        for size in ((40, 90), (64, 64), (120, 50))
    ]
