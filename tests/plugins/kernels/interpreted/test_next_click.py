"""The next click: the same pixel, label and point as those of `InteractiveSchedule`, every bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.plugins.kernels.next_click import FusedSchedule, fused_schedule
from gigamask.prompts.schedule import InteractiveSchedule, UniformClicks
from tests.plugins.kernels.interpreted.rounds import make_round
from tests.plugins.kernels.interpreter import patch_once

patch_once()


def check(sam_round, targets, uniforms):
    found, wanted = (
        kind().add_click(sam_round, targets, uniforms)
        for kind in (FusedSchedule, InteractiveSchedule)
    )
    for name in ("points_xy_input", "labels", "masks"):
        one, other = getattr(found, name), getattr(wanted, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    return wanted.labels[:, -1].tolist()


def drawn(masks: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(masks, 2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count, soft", [(1, False), (3, True)])
def test_is_the_same_click(count, soft):
    labels = check(*make_round(12, count, (19, 13), soft=soft), drawn(12))
    assert set(labels) == {0, 1}


@pytest.mark.long
def test_is_the_same_click_for_64_masks():
    check(*make_round(64, 3, (64, 64)), drawn(64))


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    masks=st.integers(1, 5),
    count=st.integers(1, 4),
    size=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    seed=st.integers(0, 1000),
)
def test_is_the_same_click_at_any_shape(masks, count, size, seed):
    check(*make_round(masks, count, size), drawn(masks, seed))


def test_the_largest_and_the_smallest_numbers():
    uniforms = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24], [0.0, 1 - 2**-24]])
    check(*make_round(3, 1, (256, 256)), uniforms)


def test_a_mask_without_error_is_confirmed():
    sam_round, targets = make_round(6, 1, (9, 7))
    masks = targets.masks.clone()
    masks[3:] = False
    targets = replace(targets, masks=masks)
    logits = torch.where(masks, 2.0, -2.0)[:, None]
    perfect = replace(sam_round, prediction=replace(sam_round.prediction, logits=logits))
    assert check(perfect, targets, drawn(6)) == [1, 1, 1, 0, 0, 0]


def test_a_mask_of_padding_has_no_point():
    sam_round, targets = make_round(2, 1, (9, 7))
    targets = replace(targets, valid=torch.zeros_like(targets.valid))
    assert check(sam_round, targets, drawn(2)) == [-1, -1]


def test_central_clicks_and_uneven_cells_are_chosen_without_the_kernel(monkeypatch):
    def refuse(*args):
        raise AssertionError("the kernel was used")

    monkeypatch.setattr("gigamask.plugins.kernels.next_click.NEXT_CLICK", refuse)
    sam_round, targets = make_round(2, 1, (9, 7))
    check(sam_round, replace(targets, cell_xy=(10 / 3, 10 / 3)), drawn(2))
    central = FusedSchedule(center_click_prob=1.0).add_click(sam_round, targets, drawn(2))
    wanted = InteractiveSchedule(center_click_prob=1.0).add_click(sam_round, targets, drawn(2))
    assert torch.equal(central.points_xy_input, wanted.points_xy_input)
    with pytest.raises(AssertionError, match="was used"):
        FusedSchedule().add_click(sam_round, targets, drawn(2))


def test_logits_in_bf16():
    sam_round, targets = make_round(4, 3, (12, 9), torch.bfloat16)
    check(sam_round, targets, drawn(4))


def test_only_sams_schedule_is_replaced():
    assert fused_schedule(InteractiveSchedule(clicks=3)) == FusedSchedule(clicks=3)
    others = UniformClicks(), FusedSchedule()
    assert tuple(map(fused_schedule, others)) == others
