"""What the kernels compute, in torch, and how close results must be."""

import torch
from torch import Tensor
from torch.nn import functional

BF16 = 2**-7
"""Largest relative error, by norm, of a result in bf16 of operations that round to it."""


def assert_close(found: list[Tensor], wanted: list[Tensor], limit: float) -> None:
    """Compare tensors by the norm of their difference, relative to that of what is wanted."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.shape == other.shape
        assert one.isfinite().all()
        size = other.double().norm().clamp(min=1e-12)
        error = float((one.double() - other.double()).norm() / size)
        assert error <= limit, f"tensor {number} of shape {tuple(one.shape)}: {error:.1e}"


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return outputs and the gradients of inputs, for random gradients of the outputs."""
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(each.shape, generator=generator).to(each.dtype) for each in outputs]
    found = torch.autograd.grad(outputs, inputs, given, retain_graph=True)
    return [*(each.detach() for each in outputs), *found]


def leaves(*tensors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return leaf copies whose values bf16 holds, in a dtype."""
    return [each.detach().bfloat16().to(dtype).requires_grad_() for each in tensors]


def upscaled(
    width: int,
    eps: float,
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    gain: Tensor,
    shift: Tensor,
    w2: Tensor,
    b2: Tensor,
    heads: Tensor,
) -> Tensor:
    """Return the logits as the transposed convolutions of Meta's decoder give them."""
    height, (four, eight) = x.shape[1] // width, (len(b1), len(b2))
    grid = x.transpose(1, 2).unflatten(2, (height, width))
    first = w1.view(2, 2, four, -1).permute(3, 2, 0, 1)
    hidden = functional.conv_transpose2d(grid, first, b1, stride=2).permute(0, 2, 3, 1)
    hidden = functional.gelu(functional.layer_norm(hidden, (four,), gain, shift, eps))
    second = w2.view(2, 2, eight, four).permute(3, 2, 0, 1)
    wide = functional.conv_transpose2d(hidden.permute(0, 3, 1, 2), second, b2, stride=2)
    return torch.einsum("mchw,mck->mkhw", functional.gelu(wide), heads)


def image_of(
    x: Tensor, index: Tensor | None, features: Tensor | None, weight: Tensor | None, masks: int
) -> Tensor:
    """Return the image tokens of each mask, expanded."""
    if len(x) != masks or index is not None:
        x = x.expand(masks, -1, -1) if index is None else x[index]
    return x if features is None or weight is None else x + features @ weight.T


def token_attention(queries: Tensor, x: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Return attended image tokens of rows of queries."""
    scores = torch.einsum("mnhc,mtc->mnht", queries, x + positions) * scale
    return torch.einsum("mnht,mtc->mnhc", scores.softmax(-1), x)


def image_attention(
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    out_bias: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    x: Tensor,
    positions: Tensor,
    scale: float,
) -> Tensor:
    """Return image tokens after attention to rows of keys, sum and layer norm."""
    scores = torch.einsum("mnhc,mtc->mthn", keys, x + positions)
    scores = scores + bias.transpose(1, 2)[:, None]
    attended = torch.einsum("mthn,mnhc->mtc", (scores * scale).softmax(-1), values)
    total = x + attended + out_bias
    return functional.layer_norm(total, total.shape[-1:], gain, shift, eps)
