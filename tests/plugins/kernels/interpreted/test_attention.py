"""Attention between prompt tokens and image tokens: results and gradients equal the eager ones."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gigamask.plugins.kernels.image_attention import ImageAttention
from gigamask.plugins.kernels.token_attention import TokenAttention
from tests.plugins.kernels.interpreted import eager
from tests.plugins.kernels.interpreter import patch_once

patch_once()
SCALE = 0.25


class Sizes(NamedTuple):
    """Heads, masks, prompt tokens, image tokens, channels, images (0: of each mask), features."""

    heads: int
    masks: int
    tokens: int
    image: int
    channels: int
    images: int
    features: int


SMALL = [
    Sizes(2, 3, 5, 33, 16, 1, 0),
    Sizes(2, 2, 7, 40, 24, 1, 4),
    Sizes(4, 2, 17, 20, 32, 0, 0),
]
MANY = [
    Sizes(1, 8, 2, 9, 16, 1, 16),
    Sizes(1, 3, 3, 33, 16, 2, 18),
    Sizes(4, 1, 20, 33, 32, 0, 0),
]


def make_source(
    sizes: Sizes, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return image tokens, positions, index of images, features and their projection."""
    count = sizes.images or sizes.masks
    (x,) = eager.leaves(torch.randn(count, sizes.image, sizes.channels), dtype=dtype)
    positions = torch.rand(sizes.image, sizes.channels).bfloat16().to(dtype)
    index = torch.arange(sizes.masks) * 7 % count if sizes.images > 1 else None
    if not sizes.features:
        return x, positions, index, None, None
    features = torch.randn(sizes.masks, sizes.image, sizes.features)
    weight = torch.randn(sizes.channels, sizes.features) * sizes.features**-0.5
    return x, positions, index, *eager.leaves(features, weight, dtype=dtype)


def check(sizes: Sizes, dtype: torch.dtype) -> None:
    """Compare both attentions in a dtype; the eager results are in float64."""
    shared, limit = sizes.images > 0, eager.BF16 if dtype == torch.bfloat16 else 1e-5
    rows = sizes.masks, sizes.tokens, sizes.heads, sizes.channels
    found: dict[str, list[list[Tensor]]] = {"tokens": [], "image": []}
    for kind in (dtype, torch.float64):
        torch.manual_seed(sum(sizes))
        is_fused = kind == dtype
        source = make_source(sizes, kind)
        x, positions, index, features, weight = source
        trained = [each for each in (x, features, weight) if each is not None]
        image = eager.image_of(x, index, features, weight, sizes.masks)
        queries, keys, values = eager.leaves(*(torch.randn(rows) for _ in range(3)), dtype=kind)
        wide = torch.float32 if is_fused else kind
        (bias,) = eager.leaves(torch.randn(rows[:3]), dtype=wide)
        vectors = eager.leaves(*(torch.randn(sizes.channels) for _ in range(3)), dtype=kind)
        own = keys, values, bias, *vectors
        if is_fused:
            out, same = TokenAttention.apply(queries, SCALE, shared, *source)
            after = ImageAttention.apply(SCALE, 1e-5, shared, *own, *source)
        else:
            out, same = eager.token_attention(queries, image, positions, SCALE), image
            after = eager.image_attention(*own, 1e-5, image, positions, SCALE)
        passed_on = [] if shared else [same]
        found["tokens"].append(eager.gradients([out, *passed_on], [queries, *trained]))
        found["image"].append(eager.gradients([after], [*own, *trained]))
    for each in found.values():
        eager.assert_close(each[0], each[1], limit)


@pytest.mark.parametrize("sizes", SMALL)
def test_equals_the_eager(sizes):
    check(sizes, torch.float32)


def test_rounds_as_bf16():
    check(SMALL[1], torch.bfloat16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", MANY)
def test_equals_the_eager_at_many_shapes(sizes, dtype):
    check(sizes, dtype)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.builds(
        Sizes,
        heads=st.integers(1, 2),
        masks=st.integers(1, 2),
        tokens=st.integers(2, 8),
        image=st.integers(2, 20),  # attention to one token has no gradient
        channels=st.integers(8, 24),  # a norm of one channel has no gradient
        images=st.integers(0, 2),
        features=st.integers(1, 18),
    )
)
def test_equals_the_eager_at_any_shape(sizes):
    check(sizes._replace(features=sizes.features if sizes.images else 0), torch.float32)


def test_tokens_that_are_left_out_have_no_part():
    torch.manual_seed(0)
    sizes = SMALL[2]
    x, positions, *rest = make_source(sizes, torch.float32)
    keys, values = (torch.randn(*sizes[1:3], sizes.heads, sizes.channels) for _ in range(2))
    vectors = [torch.randn(sizes.channels) for _ in range(3)]
    bias = torch.zeros(*sizes[1:3], sizes.heads).index_fill(1, torch.arange(4, 17), -torch.inf)
    options, image = (SCALE, 1e-5, False), (x, positions, *rest)
    of_all = ImageAttention.apply(*options, keys, values, bias, *vectors, *image)
    few = (each[:, :4] for each in (keys, values, bias))
    of_few = ImageAttention.apply(*options, *few, *vectors, *image)
    assert torch.allclose(of_all, of_few, atol=1e-6)


def test_sums_are_the_same_at_every_call():
    sizes, found = SMALL[1], []
    for _ in range(2):
        torch.manual_seed(0)
        source = make_source(sizes, torch.float32)
        (queries,) = eager.leaves(
            torch.randn(*sizes[1:3], sizes.heads, sizes.channels), dtype=torch.float32
        )
        out, _ = TokenAttention.apply(queries, SCALE, True, *source)
        x, _, _, *projected = source
        found.append(eager.gradients([out], [queries, x, *projected]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
