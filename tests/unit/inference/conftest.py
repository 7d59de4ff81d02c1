"""A small model with random weights, and pictures of several sizes."""

import numpy as np
import pytest
import torch

from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.types import MaskDecoderOutput
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


@pytest.fixture
def by_color(model, monkeypatch):
    """A model that finds all pixels of the color at the click, except where that is black."""
    side = model.config.mask_size

    def encode(images, input_sizes, drop_path=None):
        return images.float()[:, :, ::2, ::2]

    def decode(embedding, mask_image, prompts):
        x, y = (prompts.points_xy_input[:, 0] / 2).long().clamp(0, side - 1).unbind(1)
        color = embedding[0, :, y, x].T[:, :, None, None]
        same = (embedding - color).abs().amax(1, keepdim=True) < 40
        iou = (color[:, :, 0, 0].sum(1, keepdim=True) > 0).float()
        masks = torch.where(same, 20.0, -20.0).expand(-1, 3, -1, -1)
        return MaskDecoderOutput(masks, iou.expand(-1, 3))

    monkeypatch.setattr(model, "encode", encode)
    monkeypatch.setattr(model, "predict", decode)
    return model
