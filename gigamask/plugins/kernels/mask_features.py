"""The features of mask prompts: two convolutions of 2 x 2 cells, with layer norms and GELUs.

The 16 logits under an image token are a row, cell by cell, and the first convolution multiplies
them by a matrix with four equal blocks, so that both are layers of 16 channels. The backward pass
computes all of it again; logits have no gradient.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gigamask.models.layers import working_dtype
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.shared_tensors import shared
from gigamask.plugins.kernels.blocks import (
    gelu_slope,
    load_rows,
    load_vector,
    narrow,
    normalize,
    normalize_backward,
    product,
    store_rows,
)
from gigamask.plugins.kernels.operators import SLOTS, contiguous, launch, parts, register, tuned

SECOND = tl.constexpr(19 * 16)
"""Numbers of a layer: 16 x 16 weights, and 16 of bias, gain and shift each."""


@triton.jit
def _layer(x, weights, eps, G: tl.constexpr, BR: tl.constexpr):
    """Return the results of a layer whose norms have G channels, and what its gradients need."""
    i = tl.arange(0, 16)
    matrix = tl.load(weights + i[:, None] * 16 + i[None]).to(x.dtype)
    gain, shift = load_vector(weights + 272, 16, 16)[None], load_vector(weights + 288, 16, 16)[None]
    wide = product(x, tl.trans(matrix)) + load_vector(weights + 256, 16, 16)[None]
    normal, factor = normalize(tl.reshape(wide, [BR * 16 // G, G]), eps, G, G)
    normal = tl.reshape(normal, [BR, 16])
    active, slope = gelu_slope(normal * gain + shift)
    return active, (x, matrix, gain, normal, factor, slope)


@triton.jit
def _layer_backward(given, state, sums, G: tl.constexpr, BR: tl.constexpr):
    """Return the gradient of what a layer reads, and the sums of gradients of weights with its own.

    Args:
        given: Gradient of its results.
        state: What `_layer` returned.
        sums: The sums of weights, bias, gain and shift.
        G: Channels of the norms.
        BR: Rows.
    """
    x, matrix, gain, normal, factor, slope = state
    given = given * slope
    of_gain, of_shift = sums[2] + tl.sum(given * normal, 0), sums[3] + tl.sum(given, 0)
    given, normal = (
        tl.reshape(given * gain, [BR * 16 // G, G]),
        tl.reshape(normal, [BR * 16 // G, G]),
    )
    given = tl.reshape(normalize_backward(given, normal, factor, G, G), [BR, 16])
    of_bias, given = sums[1] + tl.sum(given, 0), narrow(given, x.dtype)
    sums = sums[0] + product(tl.trans(given), x), of_bias, of_gain, of_shift
    return product(given, matrix), sums


@triton.jit
def _features(masks, weights, rows, numbers, BR: tl.constexpr):
    """Return features, and what the gradients of both layers need."""
    R, width, eps = numbers
    i = tl.arange(0, 16)
    y = (rows // width * 4)[:, None] + (i // 8 * 2 + i % 4 // 2)[None]
    x = (rows % width * 4)[:, None] + (i // 4 % 2 * 2 + i % 2)[None]
    logits = tl.load(masks + y * (4 * width) + x, (rows < R)[:, None], 0.0)
    half, first = _layer(logits, weights, eps, 4, BR)
    found, second = _layer(narrow(half, logits.dtype), weights + SECOND, eps, 16, BR)
    return found, first, second


@tuned(({"BR": 64}, 4), ({"BR": 128}, 4))
def _forward_kernel(masks, weights, out, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Compute the features of some image tokens."""
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    found, _, _ = _features(masks, weights, rows, numbers, BR)
    store_rows(out, found, rows, numbers[0], 16, 16)


@triton.jit
def _zeros():
    """Return sums of gradients of a layer, in which there is nothing yet."""
    vector = tl.zeros([16], tl.float32)
    return tl.zeros([16, 16], tl.float32), vector, vector, vector


@triton.jit
def _store(found, sums):
    """Store the sums of gradients of a layer."""
    i = tl.arange(0, 16)
    tl.store(found + i[:, None] * 16 + i[None], sums[0])
    for number in tl.static_range(3):
        tl.store(found + 256 + 16 * number + i, sums[1 + number])


@tuned(({"BR": 64}, 4), ({"BR": 32}, 4))
def _backward_kernel(masks, weights, gradient, found, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Compute the gradients of weights, by program."""
    slot, of_first, of_second = tl.program_id(0), _zeros(), _zeros()
    for start in range(slot * BR, numbers[0], tl.num_programs(0) * BR):
        rows = start + tl.arange(0, BR)
        _, first, second = _features(masks, weights, rows, numbers, BR)
        given = load_rows(gradient, rows, numbers[0], 16, 16).to(tl.float32)
        given, of_second = _layer_backward(given, second, of_second, 16, BR)
        _, of_first = _layer_backward(given, first, of_first, 4, BR)
    found += slot * (2 * SECOND)
    _store(found, of_first)
    _store(found + SECOND, of_second)


def mask_features(masks: Tensor, weights: Tensor, eps: float) -> Tensor:
    """Return the features, (M, T, 16).

    Args:
        masks: Logits of masks, four for each token on a side.
        weights: Weights of both layers, the same in each of `SLOTS` slots.
        eps: Added to the norms' variance.
    """
    out = _forward_shape(masks)
    launch(
        _forward_kernel,
        lambda blocks: (parts(out.numel() // 16, blocks["BR"]),),
        *(masks, weights, out, (out.numel() // 16, masks.shape[2] // 4, eps)),
        S=(),
    )
    return out


def _forward_shape(masks: Tensor, *_: Any) -> Tensor:
    return masks.new_empty(len(masks), masks[0].numel() // 16, 16)


def mask_features_backward(masks: Tensor, weights: Tensor, given: Tensor, eps: float) -> Tensor:
    """Return the gradients of weights, by program.

    Args:
        masks: As of `mask_features`.
        weights: As of `mask_features`.
        given: Gradient of the features.
        eps: Added to the norms' variance.
    """
    found = _backward_shape(masks, weights)
    numbers = given.numel() // 16, masks.shape[2] // 4, eps
    launch(_backward_kernel, lambda _: (SLOTS,), masks, weights, given, found, numbers, S=())
    return found


def _backward_shape(masks: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return weights.new_empty(weights.shape)


def _flops(masks: Any, *_: Any) -> int:
    """Return the FLOPs of the forward pass: each logit is in two products with 16 columns."""
    return 64 * masks[0] * masks[1] * masks[2]


FORWARD = register(mask_features, _forward_shape, _flops)
BACKWARD = register(mask_features_backward, _backward_shape, lambda *args: 3 * _flops(*args))


class MaskFeatures(torch.autograd.Function):
    """Features of mask prompts; saves its inputs alone."""

    @staticmethod
    def forward(
        ctx, eps: float, masks: Float[Tensor, "M G G"], weights: Float[Tensor, "S 2 19 16"]
    ) -> Float[Tensor, "M T c"]:
        """Return the features.

        Args:
            ctx: What the backward pass needs.
            eps: Added to the norms' variance.
            masks: Logits, without a gradient.
            weights: Weights in float32, the same in each slot.
        """
        (masks,) = contiguous(masks)
        ctx.save_for_backward(masks, weights)
        ctx.eps = eps
        return FORWARD(masks, weights, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        masks, weights = ctx.saved_tensors
        return None, None, BACKWARD(masks, weights, gradients[0].contiguous(), ctx.eps)


def are_gelus(*modules: nn.Module) -> bool:
    """Return whether modules compute GELU by the error function, as the kernels do."""
    return all(type(each) is nn.GELU and each.approximate == "none" for each in modules)


def features(encoder: PromptEncoder, masks: Float[Tensor, "M G G"]) -> Float[Tensor, "M T c"]:
    """Return what `PromptEncoder.mask_features` does.

    Args:
        encoder: The encoder; it computes without kernels if it has other channels than SAM's or
            another activation, or if logits have a gradient.
        masks: Logits of masks.
    """
    layers = cast(Any, encoder.mask_downscaling)
    first, norm, activation, second, last_norm, last_activation, _ = layers
    is_known = second.weight.shape[:2] == (16, 4) and are_gelus(activation, last_activation)
    if masks.requires_grad or not is_known:
        return PromptEncoder.mask_features(encoder, masks)

    def joined() -> tuple[Tensor]:
        cells = torch.block_diag(*[first.weight.flatten(1)] * 4)
        vectors = [each.repeat(4) for each in (first.bias, norm.weight, norm.bias)]
        quarters = second.weight.permute(0, 2, 3, 1).flatten(1)
        rows = cells, *vectors, quarters, second.bias, last_norm.weight, last_norm.bias
        found = torch.cat([each.reshape(-1, 16) for each in rows]).float()
        return (found.view(2, -1, 16).expand(SLOTS, -1, -1, -1),)

    (weights,) = shared(encoder, "mask features", joined)
    return MaskFeatures.apply(norm.eps, masks.to(working_dtype(first.weight)), weights)
