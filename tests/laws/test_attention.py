"""The fused forms of attention with relative position are the plain form, forward and backward, at
every shape.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.models.sam import attention
from gigamask.models.sam.attention import (
    get_rel_pos,
    rel_pos_attention,
    rel_pos_attention_augmented,
    rel_pos_attention_chunked,
    rel_pos_attention_reference,
)
from tests.saved_tensors import saved_tensors


def inputs(batch, heads, height, width, dim, dtype=torch.float64):
    chance = torch.Generator().manual_seed(height * 100 + width)

    def make(*shape):
        return torch.randn(*shape, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()

    leaves = [make(batch, heads, height * width, dim) for _ in range(3)]
    return [*leaves, make(2 * height - 1, dim), make(2 * width - 1, dim)]


def answer_and_gradients(form, leaves):
    q, k, v, rows, columns = leaves
    answer = form(q, k, v, get_rel_pos(rows), get_rel_pos(columns))
    weight = (
        torch.linspace(-1, 1, answer.numel(), dtype=torch.float64, device=answer.device)
        .view_as(answer)
        .sin()
        .to(answer.dtype)
    )
    return [answer.detach(), *torch.autograd.grad(answer, leaves, weight)]


def assert_equal(form, leaves, limit):
    for mine, plain in zip(
        answer_and_gradients(form, leaves),
        answer_and_gradients(rel_pos_attention_reference, leaves),
        strict=True,
    ):
        assert (mine - plain).abs().max() <= limit * (1 + plain.abs().max())


def assert_close(form, leaves):
    """The half-precision answers and gradients are near those in double precision."""
    truth = answer_and_gradients(
        rel_pos_attention_reference, [leaf.detach().double().requires_grad_() for leaf in leaves]
    )
    for mine, true in zip(answer_and_gradients(form, leaves), truth, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - true).abs().mean() <= 0.02 * true.abs().mean()


@pytest.mark.parametrize("form", [rel_pos_attention_chunked, rel_pos_attention_augmented])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 8, 8, 64), (2, 2, 7, 7, 80), (1, 1, 5, 9, 64), (6, 2, 4, 4, 64), (1, 1, 36, 36, 16)],
)
def test_fused_forms_equal_the_plain_form(form, shape):
    assert_equal(form, inputs(*shape), 1e-12)


@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from([40, 100, 400, 1500]),
)
@settings(max_examples=20, deadline=None)
def test_the_size_of_chunks_changes_nothing(batch, heads, height, width, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "CHUNK", chunk)
        assert_equal(rel_pos_attention_chunked, inputs(batch, heads, height, width, 8), 1e-12)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 24))
@settings(max_examples=25, deadline=None)
def test_augmented_form_at_any_width(height, width, dim):
    assert_equal(rel_pos_attention_augmented, inputs(1, 2, height, width, dim), 1e-12)


def test_the_chunked_form_differentiates_numerically():
    assert torch.autograd.gradcheck(
        lambda q, k, v, r, c: rel_pos_attention(q, k, v, get_rel_pos(r), get_rel_pos(c)),
        inputs(1, 2, 2, 3, 4),
    )


def test_relative_offsets_are_query_minus_key():
    table = torch.arange(7.0)[:, None]
    pairs = get_rel_pos(table).flip(1)[..., 0]
    assert pairs[0, 3] == 0
    assert pairs[3, 0] == 6
    assert torch.equal(pairs.diagonal(), torch.full((4,), 3.0))


@pytest.mark.parametrize("form", [rel_pos_attention_chunked, rel_pos_attention_augmented])
def test_half_precision_is_close_to_float64(form):
    assert_close(form, inputs(1, 2, 9, 9, 64, torch.bfloat16))


def test_autocast_takes_half_queries_and_float_tables():
    q, k, v, rows, columns = inputs(1, 2, 6, 6, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        answer = rel_pos_attention(
            q.bfloat16(), k.bfloat16(), v.bfloat16(), get_rel_pos(rows), get_rel_pos(columns)
        )
    answer.float().sum().backward()
    assert answer.dtype == torch.bfloat16
    assert rows.grad.dtype == torch.float32
    assert rows.grad.abs().sum() > 0


def test_no_more_than_queries_keys_and_values_are_kept():
    q, k, v, rows, columns = inputs(1, 3, 16, 16, 8, torch.float32)
    with saved_tensors() as kept:
        rel_pos_attention_chunked(q, k, v, get_rel_pos(rows), get_rel_pos(columns))
    assert sum(tensor.numel() for tensor in kept) <= 3 * q.numel() + 2 * 16 * 16 * 8 + 4 * 16 * 16
