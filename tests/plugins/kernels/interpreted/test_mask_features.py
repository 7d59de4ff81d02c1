"""Features of mask prompts: results and gradients equal those of the convolutions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.plugins.kernels import mask_features
from tests.plugins.kernels.interpreted.eager import BF16, assert_close, gradients
from tests.plugins.kernels.interpreter import patch_once

patch_once()


def make_encoder(dtype: torch.dtype = torch.float32, **options) -> PromptEncoder:
    """Return an encoder of any grid, with random weights that bf16 holds."""
    encoder = PromptEncoder(8, (4, 4), (64, 64), **options)
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.5)
    return encoder.bfloat16().to(dtype)


def convolved(encoder: PromptEncoder, masks: Tensor) -> Tensor:
    """Return the features as Meta's encoder computes them."""
    return encoder.mask_downscaling[:6](masks[:, None]).flatten(2).transpose(1, 2)


def results(out: Tensor, encoder: PromptEncoder) -> list[Tensor]:
    return gradients([out], list(encoder.mask_downscaling[:6].parameters()))


def check(count: int, height: int, width: int, dtype: torch.dtype) -> None:
    """Compare in float32; in bf16 the error is no more than half again torch's."""
    torch.manual_seed(count + height + width)
    encoder, masks = make_encoder(), (4 * torch.randn(count, 4 * height, 4 * width)).bfloat16()
    wanted = results(convolved(encoder, masks.float()), encoder)
    encoder.image_embedding_size = height, width
    encoder, masks = encoder.to(dtype), masks.to(dtype)
    found = results(mask_features.features(encoder, masks), encoder)
    assert found[0].dtype == dtype
    if dtype == torch.float32:
        return assert_close(found, wanted, 1e-5)
    rounded = results(encoder.mask_features(masks), encoder)
    for one, other, exact in zip(found, rounded, wanted, strict=True):
        error = float((other - exact).norm() / exact.norm())
        assert_close([one], [exact], 1.5 * error + BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_equal_those_of_the_convolutions(dtype):
    check(3, 5, 7, dtype)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_equal_those_of_the_convolutions_at_sams_sizes(dtype):
    check(2, 64, 64, dtype)


@pytest.mark.long
@settings(deadline=None, max_examples=10)
@given(
    st.integers(1, 64),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_features_equal_those_of_the_convolutions_at_any_shape(count, height, width, dtype):
    check(count, height, width, dtype)


def test_other_forms_are_computed_without_the_kernel(monkeypatch):
    monkeypatch.setattr(mask_features, "MaskFeatures", None)
    masks = torch.randn(2, 16, 16)
    with pytest.raises(AttributeError):
        mask_features.features(make_encoder(), masks)
    cases = (
        (make_encoder(activation=nn.ReLU), masks),
        (make_encoder(mask_in_chans=8), masks),
        (make_encoder(), masks.clone().requires_grad_()),
    )
    for encoder, given_masks in cases:
        found = mask_features.features(encoder, given_masks)
        assert torch.equal(found, encoder.mask_features(given_masks))
