"""Layers of the prompt tokens: results and gradients equal those of torch's operations."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from gigamask.models.shared_tensors import SharedTensors
from gigamask.plugins.kernels.token_blocks import (
    Shared,
    TokensAfterImage,
    TokensAfterTokens,
    weight_gradients,
)
from gigamask.plugins.kernels.token_layers import SLOTS
from tests.plugins.kernels.interpreted.eager import BF16, assert_close, gradients, leaves
from tests.plugins.kernels.interpreter import patch_once

patch_once()
EPS = 1e-5


def normed(x: Tensor, norm: Tensor) -> Tensor:
    vectors = norm.mean(0).to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], vectors[0], vectors[1], EPS)


def norms(count: int, channels: int) -> list[Tensor]:
    """Return leaves of norms; torch's formula divides the gradient among the slots."""
    vectors = torch.randn(count, 2, channels).bfloat16().float()
    return [each.expand(SLOTS, 2, -1).clone().requires_grad_() for each in vectors]


def layer(outputs: int, inputs: int, dtype: torch.dtype) -> list[Tensor]:
    tensors = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    return leaves(*tensors, dtype=dtype)


def hidden_layer(outputs: int, inputs: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a layer before a ReLU: in bf16 none of its outputs is so near zero that rounding
    decides whether it has a gradient."""
    weight, bias = layer(outputs, inputs, dtype)
    if dtype == torch.float32:
        return [weight, bias]
    return leaves(weight / 16, torch.where(bias > 0, 1.0, -1.0), dtype=dtype)


def after_tokens(heads, attended, tokens, positions, out, out_bias, norm, weight, bias):
    total = F.linear(attended, out, out_bias)
    own = normed(total if tokens is None else tokens + total, norm)
    return F.linear(own + positions, weight, bias), own, positions.view_as(positions)


def after_image(heads, attended, tokens, positions, *weights):
    out, out_bias, norm, first, first_bias, second, second_bias, last_norm, *pairs = weights
    own = normed(tokens + F.linear(attended, out, out_bias), norm)
    hidden = F.relu(F.linear(own, first, first_bias))
    last = normed(own + F.linear(hidden, second, second_bias), last_norm)
    of_keys = F.linear(last + positions, *pairs[:2])
    of_values = F.linear(last, *pairs[2:])
    width = attended.shape[1]
    keys, scores, before = of_keys.split([width, heads, of_keys.shape[1] - width - heads], 1)
    values, after = of_values.split([width, of_values.shape[1] - width], 1)
    found = keys, scores, values, torch.cat([before, after], 1), last
    return (*found, positions.view_as(positions)) if after.shape[1] else found


def summed(found: list[Tensor]) -> list[Tensor]:
    """Return results, with the gradients of norms summed over slots."""
    return [each.sum(0) if each.ndim == 3 and len(each) == SLOTS else each for each in found]


def compare(function, eager, heads: int, inputs: list, dtype: torch.dtype) -> None:
    """Compare with torch in float32; in bf16 the error is no more than half again torch's."""

    def results(call, given):
        leaves = [each for each in given if each is not None]
        return summed(gradients(list(call(*given)), leaves))

    def errors(found):
        pairs = zip(found, wanted, strict=True)
        return [float((x - y).norm() / y.norm().clamp(min=1e-6)) for x, y in pairs]

    wide = [None if each is None else each.detach().float().requires_grad_() for each in inputs]
    wanted = results(partial(eager, heads), wide)
    found = results(partial(function.apply, Shared(None, heads, EPS)), inputs)
    if dtype == torch.float32:
        return assert_close(found, wanted, 1e-5)
    rounded = errors(results(partial(eager, heads), inputs))
    for one, other in zip(errors(found), rounded, strict=True):
        assert one <= 1.5 * other + BF16


def check_after_tokens(rows, heads, wide, dtype, adds=True):
    torch.manual_seed(rows)
    channels = heads * wide
    attended, own, positions = leaves(*torch.randn(3, rows, channels), dtype=dtype)
    weights = [
        *layer(channels, channels, dtype),
        *norms(1, channels),
        *layer(3 * channels, channels, dtype),
    ]
    inputs = [attended, own if adds else None, positions, *weights]
    compare(TokensAfterTokens, after_tokens, heads, inputs, dtype)


def check_after_image(rows, heads, wide, dtype, is_last=False):
    torch.manual_seed(rows)
    channels = heads * wide
    width = heads * channels
    inputs = leaves(torch.randn(rows, width), *torch.randn(2, rows, channels), dtype=dtype)
    own, next_own = norms(2, channels)
    keys, values = (width, 0) if is_last else (2 * channels, channels)
    weights = [
        *layer(channels, width, dtype),
        own,
        *hidden_layer(2 * channels, channels, dtype),
        *layer(channels, 2 * channels, dtype),
        next_own,
        *layer(width + heads + keys, channels, dtype),
        *layer(width + values, channels, dtype),
    ]
    compare(TokensAfterImage, after_image, heads, [*inputs, *weights], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_equal_the_eager_layers(dtype):
    check_after_tokens(14, 2, 12, dtype)
    check_after_tokens(33, 1, 8, dtype, adds=False)
    check_after_image(14, 2, 12, dtype)
    check_after_image(33, 1, 8, dtype, is_last=True)


def test_weights_of_a_step_get_the_gradients_of_all_rounds():
    rows, channels = 6, 16
    pair = layer(channels, channels, torch.float32)
    tensors = SharedTensors()
    shared = Shared(tensors, 1, EPS)
    leaf = tensors.get((0, "pair"), lambda: tuple(pair))
    given = [torch.randn(2, rows, channels) for _ in range(2)]
    for x, gradient in given:
        assert weight_gradients(shared, leaf, x, gradient) == (None, None)
    tensors.backward()
    wanted = sum(gradient.T @ x for x, gradient in given), sum(each[1].sum(0) for each in given)
    assert_close([each.grad for each in pair], list(wanted), 1e-5)
    found = weight_gradients(shared._replace(tensors=None), leaf, *given[0])
    assert_close(list(found), [given[0][1].T @ given[0][0], given[0][1].sum(0)], 1e-6)
    frozen = tuple(each.detach() for each in pair)
    assert weight_gradients(shared, frozen, *given[0]) == (None, None)


@pytest.mark.long
@settings(deadline=None, max_examples=4)
@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(4, 12),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_both_equal_the_eager_layers_at_many_shapes(rows, heads, wide, dtype, flag):
    check_after_tokens(rows, heads, wide, dtype, flag)
    check_after_image(rows, heads, wide, dtype, flag)
