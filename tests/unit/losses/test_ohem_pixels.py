import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigamask.losses.focal_dice import focal_loss, ohem_pixels, to_sortable_int
from gigamask.rng import make_rng
from tests.saved_tensors import saved_tensors, storage_bytes

SHARES = st.sampled_from([0.01, 0.25, 1 / 3, 0.5, 0.9, 1.0])
MINIMA = st.sampled_from([0, 1, 3, 7, 100_000])


def plainly(losses, valid, share, least):
    """One mask and answer, pixel by pixel."""
    there = [place for place, inside in enumerate(valid) if inside]
    count = min(len(there), max(math.ceil(share * len(there)), least))
    return sorted(sorted(there, key=lambda place: (-losses[place], place))[:count])


@given(
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    SHARES,
    MINIMA,
    st.sampled_from([2, 50]),
)
def test_hardest_pixels_of_each_mask_and_prediction_are_kept(
    seed, masks, height, width, share, least, levels
):
    rng = make_rng(seed, "test pixels")
    losses = torch.tensor(rng.integers(0, levels, (masks, 2, height, width)) / 8).float()
    valid = torch.tensor(rng.random((masks, 1, height, width)) < rng.choice([0.0, 0.5, 1.0]))
    found = ohem_pixels(losses, valid, share, least).flatten(2)
    for m in range(masks):
        for k in range(2):
            expected = plainly(
                losses[m, k].flatten().tolist(), valid[m, 0].flatten().tolist(), share, least
            )
            assert found[m, k].nonzero().flatten().tolist() == expected


def test_equal_losses_count_row_by_row_from_the_first():
    valid = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    valid[0, 0, 0, 0] = False
    losses = torch.tensor([0.0, -0.0] * 4).view(1, 1, 2, 4)
    assert ohem_pixels(losses, valid, 0.5, 0).int().tolist() == [[[[0, 1, 1, 1], [1, 0, 0, 0]]]]


def test_what_cannot_be_read_is_hardest_so_that_it_is_not_hidden():
    values = torch.tensor([1.0, math.nan, math.inf, 0.0, -math.nan, -0.0])
    values.view(torch.int32)[4] = 0xFFC00000 - 2**32  # NaN with its sign set, as processors make it
    assert to_sortable_int(values).argsort(descending=True).tolist() == [1, 4, 2, 0, 3, 5]


@pytest.fixture
def case():
    rng = make_rng(0, "test pixels")
    valid = torch.ones(3, 5, 8, dtype=torch.bool)
    valid[1, :, 5:] = False
    valid[2] = False
    return (
        torch.tensor(rng.standard_normal((3, 2, 5, 8)) * 3),
        torch.tensor(rng.random((3, 5, 8))),
        valid,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "share, least", [(0.25, 0), (0.25, 13), (0.5, 30), (0.25, 100_000), (1.0, 0)]
)
def test_mined_focal_is_the_mean_over_the_kept_and_they_alone_learn(case, share, least):
    logits, soft, valid = case
    logits.requires_grad_()
    found = focal_loss(logits, soft, valid, ohem_ratio=share, ohem_min_pixels=least)
    ones, expected = torch.ones(40, 1, 1, dtype=torch.bool), torch.zeros_like(found)
    for m in range(3):
        for k in range(2):
            x, t = logits[m, k].view(40, 1, 1, 1), soft[m].view(40, 1, 1)
            each = focal_loss(x, t, ones).flatten()
            kept = plainly(each.tolist(), valid[m].flatten().tolist(), share, least)
            expected[m, k] = each[kept].sum() / max(len(kept), 1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    slopes = (torch.autograd.grad(each.sum(), logits) for each in (found, expected))
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=0)


def test_mining_keeps_one_bool_map_more_for_the_backward_pass():
    logits = (
        torch.tensor(make_rng(0, "test pixels", 1).standard_normal((4, 3, 64, 64)))
        .float()
        .requires_grad_()
    )
    truth = logits.detach()[:, 0] > 0
    with saved_tensors() as kept:
        focal_loss(logits, truth, truth | True, ohem_ratio=0.25, ohem_min_pixels=0).sum().backward()
    assert storage_bytes(kept) < 1.6 * logits.nbytes, (
        "logits, a quarter of that for the bool map, a third for the targets"
    )
