"""The sum of the encoder's tokens and a branch, and its layer norm, in one kernel each way.

The sum stays in the dtype of the tokens, and the norm is rounded to that of the branches. The
backward pass adds the gradient of the sum to that through the norm, and scales it for the branch.
"""

from typing import Any, cast

import torch
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.runtime.autotuner import Autotuner

from gigamask.plugins.kernels.blocks import (
    load_rows,
    load_vector,
    normalize,
    normalize_backward,
    store_rows,
)
from gigamask.plugins.kernels.operators import (
    SLOTS,
    contiguous,
    launch,
    padded,
    parts,
    register,
    tuned,
)


@tuned(({"BR": 4}, 8), ({"BR": 2}, 4))
def _forward_kernel(tensors, outs, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Add and normalize some rows."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[1]
    x, branch, gain, shift = tensors
    R, eps, scale = numbers
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    total = load_rows(x, rows, R, C, P).to(tl.float32)
    if branch is not None:
        total += scale * load_rows(branch, rows, R, C, P).to(tl.float32)
        store_rows(outs[0], total, rows, R, C, P)
    normal, _ = normalize(total, eps, C, P)
    found = normal * load_vector(gain, C, P)[None] + load_vector(shift, C, P)[None]
    store_rows(outs[1], found, rows, R, C, P)


@tuned(({"BR": 4}, 8), ({"BR": 2}, 4))
def _backward_kernel(tensors, outs, numbers, S: tl.constexpr, BR: tl.constexpr):
    """Compute the gradients of the sum and the branch, and those of the norm by program."""
    C: tl.constexpr = S[0]
    P: tl.constexpr = S[1]
    x, gain, of_total, of_norm = tensors
    R, eps, scale = numbers
    slot, columns = tl.program_id(0), tl.arange(0, P)
    of_gain, of_shift = tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)
    for first in range(slot * BR, R, tl.num_programs(0) * BR):
        rows = first + tl.arange(0, BR)
        normal, factor = normalize(load_rows(x, rows, R, C, P).to(tl.float32), eps, C, P)
        gradient = load_rows(of_norm, rows, R, C, P).to(tl.float32)
        of_gain += tl.sum(gradient * normal, 0)
        of_shift += tl.sum(gradient, 0)
        gradient = gradient * load_vector(gain, C, P)[None]
        found = normalize_backward(gradient, normal, factor, C, P)
        found += load_rows(of_total, rows, R, C, P).to(tl.float32)
        store_rows(outs[0], found, rows, R, C, P)
        if outs[1] is not None:
            store_rows(outs[1], found * scale, rows, R, C, P)
    into = outs[2] + slot * (2 * C) + columns
    tl.store(into, of_gain, columns < C)
    tl.store(into + C, of_shift, columns < C)


def _launch(
    kernel: Autotuner,
    programs: int,
    tensors: list[Tensor | None],
    outs: tuple[Tensor | None, ...],
    options: list[float],
) -> None:
    """Launch a kernel for the rows of the first tensor, with one program a block if 0 are given."""
    x = cast(Tensor, tensors[0])
    channels = x.shape[-1]
    count = x.numel() // channels
    launch(
        kernel,
        lambda blocks: (programs or parts(count, blocks["BR"]),),
        *(tuple(tensors), outs, (count, *options)),
        S=(channels, padded(channels)),
    )


def branch_norm(
    tensors: list[Tensor | None], options: list[float], kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum, empty if there is no branch, and the norm.

    Args:
        tensors: Tokens, what is added or None, gain and shift.
        options: What is added to the variance, and the factor of the branch.
        kind: Dtype of the norm.
    """
    outs = _forward_shape(tensors, options, kind)
    _launch(_forward_kernel, 0, tensors, outs, options)
    return outs


def _forward_shape(tensors: Any, options: Any, kind: torch.dtype) -> Any:
    x, branch, *_ = tensors
    return x.new_empty(0 if branch is None else x.shape), x.new_empty(x.shape, dtype=kind)


def branch_norm_backward(
    tensors: list[Tensor | None], options: list[float], has_branch: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of the tokens and of the branch, and of gain and shift by program.

    Args:
        tensors: What was normalized, gain, and the gradients of the sum and of the norm.
        options: As of `branch_norm`.
        has_branch: Whether there is a branch, in the dtype of the norm.
    """
    outs = _backward_shape(tensors, options, has_branch)
    stored = outs[0], outs[1] if has_branch else None, outs[2]
    _launch(_backward_kernel, SLOTS, tensors, stored, options)
    return outs


def _backward_shape(tensors: Any, options: Any, has_branch: bool) -> Any:
    x, *_, given = tensors
    own = given.new_empty(x.shape if has_branch else 0)
    return torch.empty_like(x), own, x.new_empty(SLOTS, 2, x.shape[-1], dtype=torch.float32)


FORWARD = register(branch_norm, _forward_shape, lambda *_: 0)
BACKWARD = register(branch_norm_backward, _backward_shape, lambda *_: 0)


class BranchNorm(torch.autograd.Function):
    """Sum of tokens and a branch, and its layer norm.

    Who uses the sum passes its gradient through this backward pass, which adds its own.
    """

    @staticmethod
    def forward(
        ctx,
        options: tuple[list[float], torch.dtype],
        x: Float[Tensor, "*shape C"],
        branch: Float[Tensor, "*shape C"] | None,
        *vectors: Float[Tensor, "C"],
    ) -> tuple[Tensor, Tensor]:
        """Return the sum and the norm.

        Args:
            ctx: What the backward pass needs.
            options: Number added to the variance and factor of the branch, and dtype of the norm.
            x: Tokens.
            branch: What is added, in the dtype of the norm; None adds nothing.
            *vectors: Gain and shift.
        """
        tensors = contiguous(x, branch, *vectors)
        total, found = FORWARD(tensors, *options)
        total = x.view_as(x) if branch is None else total
        ctx.save_for_backward(total.contiguous(), vectors[0])
        ctx.options = options[0], branch is not None
        return total, found

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        """Return the gradients.

        Args:
            ctx: What the forward pass kept.
            *gradients: Those of the sum and of the norm.
        """
        gain = ctx.saved_tensors[1]
        of_x, of_branch, found = BACKWARD(contiguous(*ctx.saved_tensors, *gradients), *ctx.options)
        own = of_branch if ctx.options[1] else None
        return None, of_x, own, *found.sum(0).to(gain.dtype)
