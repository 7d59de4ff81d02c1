"""Drop path: residual branches that images skip in training (Huang et al. 2016)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

DropPath = Float[Tensor, "B 2"] | Sequence[Sequence[float]]
"""Two uniform numbers for each image."""


def is_left_out(drop_path: DropPath | None, index: int, rate: float) -> bool:
    """Return whether all images skip a branch, as far as it is known without waiting.

    Args:
        drop_path: Uniform numbers of each image; None in evaluation.
        index: The branch, 0 or 1.
        rate: Probability of skipping it.
    """
    if drop_path is None or isinstance(drop_path, Tensor):
        return False
    return all(uniforms[index] < rate for uniforms in drop_path)


def branch_scale(
    x: Float[Tensor, "B H W C"], drop_path: DropPath | None, index: int, rate: float
) -> float | Float[Tensor, "*any"] | None:
    """Return 0 for images that skip a branch, else its scale (Huang et al. 2016); None is 1.

    The scale of a single image is a number, if its uniform numbers are.

    Args:
        x: Tokens.
        drop_path: Uniform numbers of each image; None in evaluation.
        index: The branch, 0 or 1.
        rate: Probability of skipping it.
    """
    if drop_path is None or rate == 0:
        return None
    if isinstance(drop_path, Tensor):
        kept = drop_path[:, index] >= rate
    elif len(drop_path) == 1:
        return (drop_path[0][index] >= rate) / (1 - rate)
    else:
        kept = torch.tensor([uniforms[index] >= rate for uniforms in drop_path])
    scale = kept.to(torch.promote_types(x.dtype, torch.float32)) / (1 - rate)
    return scale.to(x.device, non_blocking=True)[:, None, None, None]


def add_scaled(
    x: Float[Tensor, "B H W C"],
    branch: Float[Tensor, "B H W C"],
    scale: float | Float[Tensor, "*any"] | None,
) -> Float[Tensor, "B H W C"]:
    """Return the sum of tokens and a branch.

    Args:
        x: Tokens.
        branch: The branch.
        scale: Its factor, from `branch_scale`.
    """
    if isinstance(scale, Tensor) or torch.compiler.is_compiling():
        return x + (branch if scale is None else branch.to(x.dtype) * scale)
    return _AddScaled.apply(x, branch, 1.0 if scale is None else scale)


class _AddScaled(torch.autograd.Function):
    """Sum whose gradients are scaled and cast in one operation."""

    @staticmethod
    def forward(ctx, x: Tensor, branch: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, branch.dtype
        return torch.add(x, branch, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]
        (gradient,) = gradients
        if ctx.scale == 1 and ctx.dtype == gradient.dtype:
            return gradient, gradient, None
        scaled = torch.empty_like(gradient, dtype=ctx.dtype)
        return gradient, torch.mul(gradient, ctx.scale, out=scaled), None


def by_block(
    drop_path: Float[Tensor, "B L 2"] | None, as_numbers: bool
) -> Sequence[DropPath] | None:
    """Return the uniform numbers of each block; None in evaluation.

    Args:
        drop_path: Uniform numbers of L blocks.
        as_numbers: Whether to return Python numbers, so that branches can be left out.
    """
    if drop_path is None:
        return None
    return list(zip(*drop_path.tolist(), strict=True)) if as_numbers else drop_path.unbind(1)
