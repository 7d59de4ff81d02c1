"""Sums with their layer norms: results and gradients equal those of torch's operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gigamask.distributed.activation_checkpointing import checkpoint_blocks
from gigamask.models.sam.image_encoder import EncoderBlock
from gigamask.plugins.kernels.branch_norm import BranchNorm
from gigamask.plugins.kernels.encoder import fused_blocks, transformed
from tests.plugins.kernels.interpreted.eager import BF16, assert_close, gradients, leaves
from tests.plugins.kernels.interpreter import patch_once

patch_once()
EPS, BF16_SCALE = 1e-6, 1.25  # one that bf16 holds


def eager(x: Tensor, branch: Tensor | None, gain: Tensor, shift: Tensor, scale: float):
    total = x.view_as(x) if branch is None else x + scale * branch
    return [total, F.layer_norm(total, total.shape[-1:], gain, shift, EPS)]


def check(shape: tuple[int, ...], dtype: torch.dtype, has_branch: bool, scale: float) -> None:
    """Compare with float64; tokens, gain and shift are float32, branch and norm in the dtype."""
    torch.manual_seed(sum(shape))
    wide = leaves(torch.randn(shape), *torch.randn(2, shape[-1]), dtype=torch.float32)
    branch = leaves(torch.randn(shape), dtype=dtype)[0] if has_branch else None
    inputs = [wide[0], *([] if branch is None else [branch]), *wide[1:]]
    options = [EPS, scale], dtype
    found = gradients([*BranchNorm.apply(options, wide[0], branch, *wide[1:])], inputs)
    assert [each.dtype for each in found[2:]] == [each.dtype for each in inputs]
    exact = [
        None if each is None else each.detach().double().requires_grad_()
        for each in (wide[0], branch, *wide[1:])
    ]
    outputs = eager(*exact, scale)
    wanted = gradients(outputs, [each for each in exact if each is not None])
    assert_close(found, wanted, 1e-5 if dtype == torch.float32 else BF16)
    assert_close(found[:1], wanted[:1], 1e-6)  # the sum is not rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm_equal_the_eager(dtype):
    check((5, 24), dtype, True, BF16_SCALE)
    check((2, 3, 20), dtype, False, 1.0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_and_norm_equal_the_eager_at_sizes_of_an_encoder(dtype):
    check((1, 64, 24, 1280), dtype, True, BF16_SCALE)
    check((1, 33, 31, 768), dtype, False, 1.0)


@pytest.mark.long
@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.integers(4, 70),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_sum_and_norm_equal_the_eager_at_any_shape(rows, channels, dtype, has_branch):
    check((*rows, channels), dtype, has_branch, BF16_SCALE)


def make_block(drop_rate: float = 0.25) -> EncoderBlock:
    torch.manual_seed(0)
    block = EncoderBlock(16, 2, 4, 0, drop_rate)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    return block


@pytest.mark.parametrize(
    "images, drop_path",
    [
        (1, None),
        (1, [[0.5, 0.9]]),
        (1, [[0.0, 0.9]]),
        (1, [[0.9, 0.0]]),
        (1, [[0.0, 0.0]]),
        (2, [[0.0, 0.9], [0.9, 0.9]]),
        (2, torch.tensor([[0.0, 0.9], [0.9, 0.0]])),
    ],
)
def test_a_block_equals_the_eager_where_branches_are_skipped(images, drop_path):
    block, x = make_block(), torch.randn(images, 4, 4, 16, requires_grad=True)
    inputs = [x, *block.parameters()]

    def results(out: Tensor) -> list[Tensor]:
        found = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        return [out.detach(), *(torch.zeros(1) if each is None else each for each in found)]

    assert_close(results(transformed(block, x, drop_path)), results(block(x, drop_path)), 1e-5)


def test_a_block_rounds_as_the_eager_under_autocast():
    block, (x,) = make_block(), leaves(torch.randn(1, 4, 4, 16), dtype=torch.float32)
    inputs = [x, *block.parameters()]
    wanted = gradients([block(x)], inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found, eager_found = transformed(block, x), block(x)
    assert found.dtype == eager_found.dtype == torch.float32
    errors = [
        [
            float((one - other).norm() / other.norm())
            for one, other in zip(each, wanted, strict=True)
        ]
        for each in (gradients([found], inputs), gradients([eager_found], inputs))
    ]
    for one, other in zip(*errors, strict=True):
        assert one <= 1.5 * other + BF16


def test_blocks_that_a_program_has_changed_or_that_are_recomputed_stay():
    block = make_block()
    assert [each[0] for each in fused_blocks(nn.ModuleList([block]))] == [block.attn, block]
    block.norm2.register_forward_hook(lambda *given: None)
    assert [each[0] for each in fused_blocks(nn.ModuleList([block]))] == [block.attn]
    blocks = nn.ModuleList([make_block()])
    checkpoint_blocks(blocks, 1)
    assert [each[0] for each in fused_blocks(blocks)] == [blocks[0].attn]
