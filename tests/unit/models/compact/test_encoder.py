"""Both ways to encode give the same, and what is beside an image does not matter."""

import pytest
import torch
from torch import Tensor

from gigamask.models.compact import encoder as encoders
from gigamask.models.compact.encoder import MaskedGroupNorm
from gigamask.models.init import build_model
from tests.little import COMPACT

SIZES = torch.tensor([[64, 64], [41, 64], [64, 23], [2, 5]])
"""Also sides that no stride divides."""


@pytest.fixture(scope="module")
def encoder():
    """An encoder in float64, no part of which has a special value."""
    encoder, chance = build_model(COMPACT, 0).image_encoder.double(), torch.Generator()
    chance.manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=chance).double())
    return encoder


def pictures(sizes: Tensor) -> Tensor:
    """Return pixels that are 0 in the padding."""
    chance = torch.Generator().manual_seed(2)
    pixels = torch.randn((len(sizes), 3, 64, 64), generator=chance, dtype=torch.float64)
    for image, (height, width) in zip(pixels, sizes.tolist(), strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    return pixels


def gradients(encoder, pixels: Tensor) -> list[Tensor]:
    encoder.zero_grad()
    weights = torch.linspace(-1, 1, 16, dtype=torch.float64)
    (encoder(pixels, None, SIZES) * weights * weights[:, None]).square().sum().backward()
    return [parameter.grad for parameter in encoder.parameters()]


@pytest.mark.slow
def test_masked_padding_is_as_no_padding(encoder, monkeypatch):
    """A GPU's way and a CPU's, with their gradients."""
    pixels = pictures(SIZES)
    cropped, own = encoder(pixels, None, SIZES), gradients(encoder, pixels)
    monkeypatch.setattr(encoders, "is_readable", lambda tensor: False)
    masked, others = encoder(pixels, None, SIZES), gradients(encoder, pixels)
    assert cropped.shape == (4, COMPACT.encoder.channels(COMPACT), 16, 16)
    assert torch.allclose(masked, cropped, rtol=1e-10, atol=1e-10)
    for one, other in zip(own, others, strict=True):
        assert (one - other).abs().max() <= 1e-9 * max(1, one.abs().max())
        assert one.any()


@pytest.mark.parametrize("has_values", [True, False])
def test_images_of_a_batch_are_encoded_as_each_alone(encoder, has_values, monkeypatch):
    monkeypatch.setattr(encoders, "is_readable", lambda tensor: has_values)
    pixels = pictures(SIZES)
    together = encoder(pixels, None, SIZES)
    for i in range(len(SIZES)):
        alone = encoder(pixels[i : i + 1], None, SIZES[i : i + 1])
        assert torch.allclose(alone[0], together[i], rtol=1e-10, atol=1e-10)


def test_what_lies_in_the_padding_does_not_matter():
    """`encode` sets it to 0; so it does for a model."""
    model = build_model(COMPACT, 0)
    images = torch.full((1, 3, 64, 64), 90, dtype=torch.uint8)
    other = images.clone()
    other[:, :, 50:] = 7
    sizes = torch.tensor([[50, 64]])
    assert torch.equal(model.encode(images, sizes), model.encode(other, sizes))


@pytest.mark.parametrize("has_values", [True, False])
def test_first_channel_says_what_is_inside(encoder, has_values, monkeypatch):
    """A token that is partly inside counts; everything is 0 in the others."""
    monkeypatch.setattr(encoders, "is_readable", lambda tensor: has_values)
    embedding = encoder(pictures(SIZES), None, SIZES)
    for image, (height, width) in zip(embedding, SIZES.tolist(), strict=True):
        inside = torch.zeros(16, 16, dtype=torch.bool)
        inside[: -(-height // 4), : -(-width // 4)] = True
        assert torch.equal(image[0], inside.double())
        assert not image[:, ~inside].any()
        assert image[1:, inside].abs().sum(0).all()


def test_features_of_stride_2_stay_in_their_place(encoder):
    """They are four to a token; pixel shuffle gives the map back."""
    maps = []
    hook = encoder.fine_out.register_forward_hook(lambda _, given, out: maps.append(out))
    embedding = encoder(pictures(SIZES[:1]), None, SIZES[:1])
    hook.remove()
    width = COMPACT.encoder.width
    assert torch.equal(torch.pixel_shuffle(embedding[:, 1 + width :], 2), maps[0])


def test_normalization_is_over_valid_pixels():
    norm = MaskedGroupNorm(16).double()
    chance = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn((2, 16, 6, 6), generator=chance, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 16))
        norm.bias.copy_(torch.linspace(-1, 1, 16))
    valid = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    valid[0, :, :4, :5] = 1
    valid[1] = 1
    masked = norm(x, valid)
    assert norm.num_groups == 2
    assert torch.allclose(masked[:1, :, :4, :5], norm(x[:1, :, :4, :5]), atol=1e-12)
    assert torch.allclose(masked[1], norm(x)[1], atol=1e-12)
    assert norm(x, torch.zeros_like(valid)).isfinite().all()


def test_stages_are_the_blocks(encoder):
    assert encoder.blocks == list(encoder.stages)
    assert len(encoder.blocks) == 3
    assert build_model(COMPACT, 0).encoder_blocks[0].down.conv.stride == (2, 2)
