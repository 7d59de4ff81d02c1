"""The encoder's attention: results and gradients equal those of the bias written out."""

from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gigamask.models.init import build_model
from gigamask.models.sam.attention import rel_pos_attention_reference
from gigamask.models.sam.image_encoder import EncoderAttention
from gigamask.plugins.kernels.encoder import MAX_CHANNELS, WindowAttention, attended, fused_blocks
from tests.plugins.kernels.interpreted import eager
from tests.plugins.kernels.interpreted.test_decoder import CONFIG, kernels_in
from tests.plugins.kernels.interpreter import patch_once

patch_once()


class Sizes(NamedTuple):
    """Images, height and width of the grid, side of a window (0: the grid), heads, channels."""

    images: int
    height: int
    width: int
    window: int
    heads: int
    channels: int


SMALL = [Sizes(1, 9, 7, 0, 2, 24), Sizes(2, 5, 7, 3, 1, 16), Sizes(1, 4, 4, 2, 2, 8)]
MANY = [
    Sizes(1, 14, 14, 14, 2, 64),
    Sizes(1, 16, 20, 14, 1, 80),
    Sizes(1, 8, 64, 0, 1, 80),
    Sizes(1, 33, 21, 0, 1, 16),
    Sizes(1, 24, 24, 0, 1, 80),
    Sizes(1, 3, 100, 0, 1, 64),
]


def make(sizes: Sizes) -> tuple[EncoderAttention, Tensor]:
    """Return random attention, whose tables may be longer than needed, and tokens."""
    torch.manual_seed(sum(sizes))
    dim, side = sizes.heads * sizes.channels, max(sizes.height, sizes.width) + 1
    attention = EncoderAttention(dim, sizes.heads, side, sizes.window)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.ndim == 1 else dim**-0.5)
    x = torch.randn(sizes.images, sizes.height, sizes.width, dim)
    return attention, x


def results(attention: EncoderAttention, x: Tensor, dtype: torch.dtype, is_fused: bool):
    """Return attended tokens and all gradients, of values that bf16 holds."""
    attention = attention.bfloat16().to(dtype)
    attention.use_attention(rel_pos_attention_reference)
    (x,) = eager.leaves(x, dtype=dtype)
    out = attended(attention, x) if is_fused else attention(x)
    return eager.gradients([out], [x, *attention.parameters()])


def check(sizes: Sizes, dtype: torch.dtype = torch.float32) -> None:
    """Compare in a dtype; the eager results are in float64."""
    attention, x = make(sizes)
    found = results(attention, x, dtype, True)
    wanted = results(attention, x, torch.float64, False)
    # Twice: torch in bf16 is as far from float64, 1.1e-2 in the gradients of tables.
    eager.assert_close(found, wanted, 2 * eager.BF16 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", SMALL)
def test_equals_the_eager(sizes):
    check(sizes)


def test_rounds_as_bf16():
    check(SMALL[1], torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes, dtype",
    [*((sizes, torch.float32) for sizes in MANY), *((sizes, torch.bfloat16) for sizes in MANY[:2])],
)
def test_equals_the_eager_at_many_shapes(sizes, dtype):
    check(sizes, dtype)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(
    sizes=st.builds(
        Sizes,
        images=st.integers(1, 2),
        height=st.integers(2, 9),
        width=st.integers(2, 18),
        window=st.integers(0, 5).filter(lambda side: side != 1),  # attention to one has no gradient
        heads=st.integers(1, 2),
        channels=st.integers(1, 40),
    )
)
def test_equals_the_eager_at_any_shape(sizes):
    check(sizes)


def test_other_forms_are_computed_without_kernels(monkeypatch):
    def refuse(*args):
        raise AssertionError("the kernels were used")

    monkeypatch.setattr(WindowAttention, "apply", refuse)
    attention, x = make(SMALL[1])
    with pytest.raises(AssertionError, match="were used"):
        attended(attention, x)
    hooked, _ = make(SMALL[1])
    hooked.qkv.register_forward_hook(lambda *given: None)
    plain = EncoderAttention(16, 1, 8, 3, use_rel_pos=False)
    wide = EncoderAttention(MAX_CHANNELS + 1, 1, 2, 0)
    for each, tokens in ((hooked, x), (plain, x), (wide, torch.randn(1, 2, 2, MAX_CHANNELS + 1))):
        for parameter in each.parameters():
            torch.nn.init.normal_(parameter)
        assert torch.equal(attended(each, tokens), each(tokens))


def test_attention_that_a_program_has_replaced_stays():
    attention, _ = make(SMALL[1])
    ((module, name, _),) = fused_blocks(torch.nn.Sequential(attention))
    assert (module, name) == (attention, "forward")
    attention.use_attention(lambda *given: given[0])
    assert not fused_blocks(torch.nn.Sequential(attention))


def test_sums_are_the_same_at_every_call():
    attention, x = make(SMALL[1])
    one, other = (results(attention, x, torch.float32, True) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_an_encoder_computes_with_the_kernels_where_they_are_used():
    model = build_model(CONFIG, 0, "cpu")
    pixels = torch.randn(1, 3, 64, 64)
    found = []
    for context in (nullcontext(), kernels_in(model)):
        with context:
            out = model.image_encoder(pixels)
        found.append(eager.gradients([out], list(model.image_encoder.parameters())))
    eager.assert_close(found[1], found[0], 1e-5)
    assert "forward" not in vars(model.image_encoder.blocks[0].attn)


def test_attention_with_a_hook_gets_windows_as_without_kernels():
    model, seen = build_model(CONFIG, 0, "cpu"), []
    attention = model.image_encoder.blocks[0].attn
    attention.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    for context in (nullcontext(), kernels_in(model)):
        with context:
            model.image_encoder(torch.randn(1, 3, 64, 64))
    assert seen[0] == seen[1]
    assert seen[0][1:3] == (attention.window_size, attention.window_size)
