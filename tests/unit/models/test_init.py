"""The custom initialization of small models."""

from dataclasses import replace

import pytest
import torch

from gigamask.models.configs import tiny
from gigamask.models.init import build_model

pytestmark = pytest.mark.slow


def similarity(custom_init: bool) -> float:
    """Return the share of image tokens that a hypernetwork's mask from their content selects."""
    decoder = build_model(replace(tiny(), custom_init=custom_init), 0).mask_decoder
    tokens = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        heads = torch.stack(
            [decoder.output_hypernetworks_mlps[1](tokens[0, i]) for i in range(64)], -1
        )
        logits = decoder.upscaled(tokens, heads[None], torch.empty(16, 16, 64))
    by_token = torch.nn.functional.avg_pool2d(logits, 4).flatten(2)[0]
    own = by_token[torch.arange(64), torch.arange(64)]
    return float((own > by_token.mean(1)).float().mean())


def test_masks_start_as_similarity():
    assert similarity(custom_init=True) > 0.9
    assert similarity(custom_init=False) < 0.7


def test_background_is_the_start():
    """An average token's mask is background nearly everywhere."""
    decoder = build_model(tiny(), 0).mask_decoder
    with torch.no_grad():
        head = decoder.output_hypernetworks_mlps[1](torch.zeros(1, 64))
        tokens = torch.randn(1, 256, 64, generator=torch.Generator().manual_seed(1))
        logits = decoder.upscaled(tokens, head[..., None], torch.empty(16, 16, 64))
    assert float(logits.mean()) == pytest.approx(-2.3, abs=0.7)


def test_the_embedding_starts_as_a_picture_of_colours():
    """Embeddings of different images differ more than with the ordinary initialization."""
    images = (
        torch.randint(0, 256, (8, 3, 4, 4), generator=torch.Generator().manual_seed(2))
        .repeat_interleave(32, 2)
        .repeat_interleave(32, 3)
    )
    spreads = []
    for custom_init in (True, False):
        model = build_model(replace(tiny(), custom_init=custom_init), 0)
        with torch.no_grad():
            spreads.append(
                float(model.encode(images.to(torch.uint8), torch.full((8, 2), 128)).std(0).mean())
            )
    assert spreads[0] > 1.2 * spreads[1]
