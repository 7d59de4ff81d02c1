import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gigamask.losses.points import PLASTIC, interpolate_at, r2_sequence, sample_points, valid_extent
from gigamask.rng import make_rng
from gigamask.types import Targets
from tests.saved_tensors import saved_tensors, storage_bytes


def blob(masks, side, seed=0):
    """Smooth logits of 3 predictions on a side x side grid, and noisy targets like them."""
    rng = make_rng(seed, "test points")
    coarse = torch.tensor(rng.standard_normal((masks, 3, 6, 6)))
    logits = F.interpolate(coarse, (side, side), mode="bicubic", align_corners=False).float() * 4
    return logits, (
        logits[:, 0] + torch.tensor(rng.standard_normal((masks, side, side))).float() > 0
    )


def truth_of(masks, valid=None, seed=0):
    shift = torch.tensor(make_rng(seed, "test shift").random((len(masks), 2))).float()
    valid = torch.ones(masks.shape, dtype=torch.bool) if valid is None else valid
    return Targets(
        masks, valid, torch.zeros(len(masks), 4), (4.0, 4.0), torch.ones(len(masks), 2), shift
    )


def test_places_far_along_the_sequence_stay_below_one_and_are_even():
    found = r2_sequence(torch.arange(10**7, 10**7 + 4096), torch.tensor([[1 - 2**-24, 0.5]]))
    assert math.isclose(PLASTIC**3, PLASTIC + 1, rel_tol=1e-15)
    assert found.min() >= 0
    assert found.max() < 1
    counts, _, _ = np.histogram2d(*found[0].numpy().T, bins=16, range=[[0, 1], [0, 1]])
    assert counts.min() >= 13, (
        "16 expected in each of 256 boxes; independent numbers would leave one with 6 or fewer"
    )
    assert counts.max() <= 19


def test_every_place_is_uniform_over_the_valid_part_and_the_sequence_is_even_in_it():
    valid = torch.zeros(2000, 8, 8, dtype=torch.bool)
    valid[:, :6, :3] = True
    assert valid_extent(valid)[0].tolist() == [3 / 8, 6 / 8]
    shift = torch.tensor(make_rng(0, "test shift").random((2000, 2))).float()
    places = r2_sequence(torch.tensor([5, 77]), shift) * valid_extent(valid)[:, None]
    for which in range(2):
        for axis, extent in enumerate((3 / 8, 6 / 8)):
            counts = np.histogram(places[:, which, axis].numpy(), bins=10, range=(0, extent))[0]
            assert counts.sum() == 2000
            assert ((counts - 200) ** 2 / 200).sum() < 27.9, "chi squared of 9 degrees at 0.1 %"


def test_gradient_of_reading_is_its_slope_and_what_is_not_finite_stays_so():
    low = blob(2, 5)[0][:, :2].double().requires_grad_()
    places = torch.tensor(make_rng(0, "test places").random((2, 2, 9, 2))).float()
    places[0, 0, :4] = torch.tensor(
        [[0.0, 0.0], [1 - 2**-24, 0.0], [0.5, 0.5], [1 - 2**-24, 1 - 2**-24]]
    )
    assert torch.autograd.gradcheck(lambda x: interpolate_at(x, places), low, atol=1e-7)
    weights = torch.ones(2, 2, 9, dtype=torch.float64)
    weights[0, 0, 3], weights[1, 1, 0] = math.nan, math.inf
    (grad,) = torch.autograd.grad((interpolate_at(low, places) * weights).sum(), low)
    assert grad.isfinite().all((2, 3)).tolist() == [[False, True], [True, False]]
    (none,) = torch.autograd.grad((interpolate_at(low, places) * 0).sum(), low)
    assert (none == 0).all()


def test_the_gradient_does_not_depend_on_the_order_of_the_points():
    low, _ = blob(1, 8)
    places = torch.tensor(make_rng(0, "test places").random((1, 3, 500, 2))).float()
    weights = torch.tensor(make_rng(0, "test weights").standard_normal((1, 3, 500))).float()
    grads = []
    for order in (torch.arange(500), torch.tensor(make_rng(0, "test order").permutation(500))):
        x = low.clone().requires_grad_()
        grads.extend(
            torch.autograd.grad(
                (interpolate_at(x, places[:, :, order]) * weights[:, :, order]).sum(), x
            )
        )
    assert torch.equal(*grads)


def test_points_are_the_most_uncertain_and_some_others_by_a_plain_loop():
    low, masks = blob(3, 16)
    truth = truth_of(masks)
    count, oversample, important, index = 40, 3.0, 0.75, 2
    found = sample_points(low, truth, index, count, oversample, important)
    for m in range(3):
        for k in range(3):
            first = index * (120 + 10)
            places = [
                [math.fmod(n / PLASTIC**p + float(truth.shift[m, p - 1]), 1) for p in (1, 2)]
                for n in range(first, first + 130)
            ]
            read = interpolate_at(low[m : m + 1, k : k + 1], torch.tensor([[places]]))[0, 0]
            under = [bool(masks[m, int(y * 16), int(x * 16)]) for x, y in places]
            seen = list(zip(read.tolist(), under, strict=True))
            expected = sorted(seen[:120], key=lambda point: abs(point[0]))[:30] + seen[120:]
            pairs = sorted(
                zip(found.logits[m, k].tolist(), found.targets[m, k].tolist(), strict=True)
            )
            assert [logit for logit, _ in pairs] == pytest.approx(
                [logit for logit, _ in sorted(expected)], abs=1e-3
            )
            assert (
                sum(
                    one != other
                    for (_, one), (_, other) in zip(pairs, sorted(expected), strict=True)
                )
                <= 1
            ), "one on a cell's edge"
    assert found.valid.all()


def test_without_importance_sampling_all_predictions_share_the_sequences_points():
    low, masks = blob(2, 16)
    found = sample_points(low, truth_of(masks), 1, 64, 1.0, 0.0)
    assert torch.equal(found.targets[:, 0], found.targets[:, 1])
    places = r2_sequence(torch.arange(128, 256), truth_of(masks).shift)[:, 64:]
    assert torch.equal(found.logits, interpolate_at(low, places[:, None].expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("extent", [(11, 16), (16, 5), (1, 1), (7, 13)])
def test_padding_is_never_sampled(soft, extent):
    low, masks = blob(2, 16)
    valid = torch.zeros(2, 16, 16, dtype=torch.bool)
    valid[:, : extent[0], : extent[1]] = True
    inner, outer = (0.75, 0.0) if soft else (True, False)
    masks = torch.where(valid, torch.tensor(inner), torch.tensor(outer))
    found = sample_points(low, truth_of(masks, valid), 3, 500, 3.0, 0.75)
    assert found.valid.all()
    assert found.targets.dtype == masks.dtype
    if soft:
        assert torch.allclose(found.targets, torch.tensor(0.75), atol=1e-4), (
            "an object that the padding cuts is not faded out"
        )
    else:
        assert found.targets.all()


def test_coverage_is_interpolated_bilinearly_between_cells():
    low, _ = blob(2, 16)
    masks = torch.tensor(make_rng(0, "test shares").random((2, 16, 16))).float()
    found = sample_points(low, truth_of(masks), 0, 200, 1.0, 0.0)
    same = sample_points(masks[:, None].expand(-1, 3, -1, -1), truth_of(masks), 0, 200, 1.0, 0.0)
    assert torch.allclose(found.targets, same.logits, atol=1e-5)


def test_a_mask_without_a_valid_cell_has_no_place_and_no_masks_have_no_points():
    low, masks = blob(2, 16)
    for truth in (masks, masks.float()):
        assert not sample_points(low, truth_of(truth, masks & False), 0, 10, 3.0, 0.75).valid.any()
        assert sample_points(low[:0], truth_of(truth[:0]), 0, 10, 3.0, 0.75).logits.shape == (
            0,
            3,
            10,
        )


def test_target_may_be_finer_than_the_logits():
    low, _ = blob(2, 16)
    fine = F.interpolate(low, (64, 64), mode="bilinear", align_corners=False)[:, 0] > 0
    found = sample_points(low, truth_of(fine), 0, 2000, 3.0, 0.0)
    assert ((found.logits[:, 0] > 0) == found.targets[:, 0]).float().mean() > 0.97, (
        "they differ only within a fine cell of the edge"
    )


def test_the_backward_pass_of_reading_keeps_the_places_alone():
    low = torch.zeros(2, 3, 64, 64, requires_grad=True)
    places = torch.zeros(2, 3, 100, 2)
    with saved_tensors() as kept:
        interpolate_at(low, places).sum().backward()
    assert storage_bytes(kept) == places.nbytes
