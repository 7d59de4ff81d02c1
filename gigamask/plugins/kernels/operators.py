"""Kernels as operators of torch: their registration, launch and configurations.

An operator has a shape for fake tensors and a formula of its FLOPs, so that a step is planned and
counted without a GPU. On a GPU the fastest of a few configurations is chosen at the first call for
given sizes, and kept in Triton's cache for chips of this kind; the interpreter uses the first.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.runtime.autotuner import Autotuner

NAMESPACE = "gigamask_kernels"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
SLOTS = 256
"""Programs of a backward pass over many rows, each with a sum of gradients of its own."""


def register(
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    flops: Callable[..., int],
    mutated: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Register a function that launches a kernel as an operator, and return the operator.

    Args:
        run: The function; its name is the operator's.
        shapes: Returns empty results for the same arguments.
        flops: Returns the FLOPs for the arguments, shapes in place of tensors.
        mutated: Arguments that it changes.
    """
    LIBRARY.define(run.__name__ + torch.library.infer_schema(run, mutates_args=mutated))
    LIBRARY.impl(run.__name__, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{run.__name__}", shapes, lib=LIBRARY)
    packet = getattr(getattr(torch.ops, NAMESPACE), run.__name__)
    register_flop_formula(packet)(lambda *args, out_shape=None, **_: flops(*args))
    return packet.default


def tuned(*configs: tuple[dict[str, int], int]) -> Callable[[Callable[..., None]], Autotuner]:
    """Return a decorator of a kernel with a few configurations, chosen for each `S`.

    Args:
        *configs: Sizes of the blocks, and the number of warps; the interpreter uses the first.
    """
    made = [triton.Config(blocks, num_warps=warps, num_stages=1) for blocks, warps in configs]
    tune = triton.autotune(made, ["S"], cache_results=True)
    return lambda kernel: tune(triton.jit(kernel))


def launch(
    kernel: Autotuner,
    grid: Callable[[dict[str, int]], tuple[int, ...]],
    *args: Any,
    **constants: Any,
) -> None:
    """Launch a kernel.

    Args:
        kernel: The kernel.
        grid: Returns the number of programs, from the sizes of the blocks.
        *args: Tensors and numbers, and tuples of them.
        **constants: What is compiled into it, besides the sizes of the blocks.
    """
    if triton.knobs.runtime.interpret:
        blocks = kernel.configs[0].kwargs
        kernel.fn[grid(blocks)](*args, **constants, **blocks)
    else:
        kernel[grid](*args, **constants)


def padded(size: int, least: int = 16) -> int:
    """Return the size of the block that holds a dimension, a power of two.

    Args:
        size: The dimension.
        least: Smallest size that a matrix product takes.
    """
    return max(least, 1 << (size - 1).bit_length())


def parts(size: int, block: int) -> int:
    """Return how many blocks hold a dimension.

    Args:
        size: The dimension.
        block: Size of a block.
    """
    return -(-size // block)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors contiguous, as the kernels read them; None stays."""
    return [None if each is None else each.contiguous() for each in tensors]
