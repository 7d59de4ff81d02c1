"""The blocks of SAM's image encoder with fused kernels: attention, and norms with sums."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gigamask.models.drop_path import DropPath, add_scaled, branch_scale, is_left_out
from gigamask.models.layers import working_dtype
from gigamask.models.sam.attention import rel_pos_attention
from gigamask.models.sam.image_encoder import EncoderAttention, EncoderBlock
from gigamask.models.shared_tensors import is_own, is_plain
from gigamask.plugins.kernels import window_attention, window_bias
from gigamask.plugins.kernels.branch_norm import BranchNorm
from gigamask.plugins.kernels.operators import contiguous

MAX_CHANNELS = 128
"""Most channels of a head."""


class WindowAttention(torch.autograd.Function):
    """Attention within windows, from projected tokens to attended values."""

    @staticmethod
    def forward(
        ctx,
        window: list[int],
        projected: Float[Tensor, "B H W D3"],
        bias: Float[Tensor, "D3"] | None,
        rows: Float[Tensor, "L d"],
        columns: Float[Tensor, "K d"],
    ) -> Float[Tensor, "B H W D"]:
        """Return attended values.

        Args:
            ctx: What the backward pass needs.
            window: Height and width of a window, and heads.
            projected: Queries, keys and values.
            bias: Those of padding; None if windows fill the grid.
            rows: Vectors of the offsets of rows.
            columns: Vectors of the offsets of columns.
        """
        projected, bias, *tables = contiguous(projected, bias, rows, columns)
        biases = window_bias.BIAS(projected, tables, window)
        out, lse = window_attention.FORWARD([projected, bias], biases, window)
        ctx.save_for_backward(projected, bias, *tables, *biases, out, lse)
        ctx.window = window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Return the gradients.

        Args:
            ctx: What the forward pass kept.
            gradient: Gradient of the attended values.
        """
        projected, bias, rows, columns, *biases, out, lse = ctx.saved_tensors
        source, tables, window = [projected, bias], [rows, columns], ctx.window
        (gradient,) = contiguous(gradient)
        given = [out, lse, gradient]
        of_queries, *slopes, mean = window_attention.QUERIES(source, biases, given, window)
        of_projected, padding = window_attention.KEYS(source, biases, [lse, mean, gradient], window)
        own = of_projected[..., : out.shape[-1]]
        window_bias.QUERIES(projected, tables, slopes, of_queries, own, window)
        of_tables = window_bias.TABLES(projected, tables, slopes, window).sum(0)
        of_bias = None if bias is None else padding.sum(0).to(bias.dtype)
        return None, of_projected, of_bias, *of_tables.to(rows.dtype).split([*map(len, tables)])


def attended(attention: EncoderAttention, x: Float[Tensor, "B H W C"]) -> Float[Tensor, "B H W C"]:
    """Return what `EncoderAttention.forward` does.

    Args:
        attention: The attention; it computes without kernels if it has no relative positions,
            another projection than a linear layer's, or more channels of a head.
        x: Tokens.
    """
    rows, columns, heads = attention.rel_pos_h, attention.rel_pos_w, attention.num_heads
    h, w = (attention.window_size or side for side in x.shape[1:3])
    is_small = x.shape[-1] // heads <= MAX_CHANNELS
    if rows is None or columns is None or not is_small or not is_plain(attention.qkv):
        return EncoderAttention.forward(attention, x)
    is_padded = x.shape[1] % h or x.shape[2] % w
    bias = attention.qkv.bias if is_padded else None
    return attention.proj(
        WindowAttention.apply([h, w, heads], attention.qkv(x), bias, rows, columns)
    )


def transformed(
    block: EncoderBlock, x: Float[Tensor, "B H W C"], drop_path: DropPath | None = None
) -> Float[Tensor, "B H W C"]:
    """Return what `EncoderBlock.forward` does.

    Args:
        block: The block.
        x: Tokens.
        drop_path: As of `EncoderBlock.forward`.
    """
    branch, factor, kind = None, 1.0, working_dtype(x)
    for index, (norm, module) in enumerate(((block.norm1, block.attn), (block.norm2, block.mlp))):
        if is_left_out(drop_path, index, block.drop_rate):
            continue
        options = [norm.eps, factor], kind
        x, found = BranchNorm.apply(options, x, branch, norm.weight, norm.bias)
        branch, scale = module(found), branch_scale(x, drop_path, index, block.drop_rate)
        factor = 1.0 if scale is None else scale
        if isinstance(factor, Tensor) or branch.dtype != kind:
            x, branch, factor = add_scaled(x, branch, scale), None, 1.0
    return x if branch is None else add_scaled(x, branch, factor)


def fused_blocks(model: nn.Module) -> list[tuple[nn.Module, str, Callable[..., Any]]]:
    """Return the methods to replace: each module, the method's name, and the method with kernels.

    Args:
        model: The model; attention, blocks and norms that a program has replaced or hooked into
            stay, as do blocks with these, and those that are recomputed.
    """

    def unchanged(kind: type[nn.Module]) -> list[Any]:
        forward = cast(Any, kind.forward)
        return [each for each in model.modules() if each.forward == forward.__get__(each)]

    return [
        (each, "forward", partial(attended, each))
        for each in unchanged(EncoderAttention)
        if getattr(each.attend, "__module__", None) == rel_pos_attention.__module__
    ] + [
        (each, "forward", partial(transformed, each))
        for each in unchanged(EncoderBlock)
        if is_own(each.attn, EncoderAttention)
        and is_own(each.norm1, nn.LayerNorm)
        and is_own(each.norm2, nn.LayerNorm)
    ]
