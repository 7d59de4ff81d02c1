"""Upscaling: logits and gradients equal those of transposed convolutions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.plugins.kernels.upscaling import Upscaling
from tests.plugins.kernels.interpreted.eager import BF16, assert_close, gradients, leaves, upscaled
from tests.plugins.kernels.interpreter import patch_once

patch_once()


def check(dim: int, masks: int, height: int, width: int, count: int, dtype: torch.dtype) -> None:
    """Compare in a dtype; the eager results are in float64."""
    torch.manual_seed(dim + masks + height + width + count)
    four, eight = dim // 4, dim // 8
    tensors = (
        torch.randn(masks, height * width, dim),
        torch.randn(4 * four, dim) * dim**-0.5,
        *(torch.randn(four) for _ in range(3)),
        torch.randn(4 * eight, four) * four**-0.5,
        torch.randn(eight),
        torch.randn(masks, eight, count),
    )
    found = []
    for run, kind in ((Upscaling.apply, dtype), (upscaled, torch.float64)):
        inputs = leaves(*tensors, dtype=kind)
        found.append(gradients([run(width, 1e-6, *inputs)], inputs))
    assert_close(*found, BF16 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", [(32, 2, 3, 5, 3), (24, 1, 4, 9, 1), (64, 1, 4, 4, 4)])
def test_equals_the_eager(sizes):
    check(*sizes, torch.float32)


def test_rounds_as_bf16():
    check(32, 2, 3, 5, 2, torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(256, 1, 8, 8, 3), (256, 2, 5, 7, 1), (16, 16, 2, 3, 1), (16, 1, 16, 16, 1)]
)
def test_equals_the_eager_at_many_shapes(sizes, dtype):
    check(*sizes, dtype)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    dim=st.integers(4, 8).map(lambda n: 8 * n),  # a norm of two channels has next to no gradient
    masks=st.integers(1, 3),
    height=st.integers(1, 6),
    width=st.integers(1, 6),
    count=st.integers(1, 4),
)
def test_equals_the_eager_at_any_shape(dim, masks, height, width, count):
    check(dim, masks, height, width, count, torch.float32)
