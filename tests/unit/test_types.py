"""The records' own acts: a batch of some masks alone, and a batch in its padded form."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigamask.masks.rle import RLEMasks
from gigamask.records import DataCursor
from gigamask.rng import make_rng
from gigamask.types import Batch, RandomInputs, RandomSpec, Targets

GRID = 12
OF_MASKS = {
    *("mask_image", "strata", "boxes_input", "rle_bounds", "rle_offsets", "random_inputs"),
    "classes",
}


def batch_of(counts: list[int], seed: int) -> Batch:
    """Images with so many masks each, of random pixels; some masks are empty or all of the grid."""
    generator, masks = np.random.default_rng(seed), sum(counts)
    share = generator.choice([0.0, 0.2, 0.5, 1.0], (masks, 1, 1))
    runs = RLEMasks.from_dense(generator.random((masks, GRID, GRID)) < share)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.random(shape, np.float32))

    images = len(counts)
    return Batch(
        names=tuple(map(str, range(images))),
        images=torch.from_numpy(generator.integers(256, size=(images, 3, 16, 16), dtype=np.uint8)),
        input_sizes=torch.full((images, 2), 16),
        scale_xy=torch.ones(images, 2),
        batch_index=torch.from_numpy(generator.permutation(images)),
        weights=drawn(images),
        mask_image=torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64)),
        strata=torch.from_numpy(generator.integers(5, size=masks)),
        boxes_input=drawn(masks, 4),
        rle_bounds=torch.from_numpy(runs.bounds),
        rle_offsets=torch.from_numpy(runs.offsets),
        mask_size=GRID,
        random_inputs=RandomInputs(
            drawn(masks), drawn(masks, 3, 2), drawn(masks, 4), drawn(images, 2, 2), drawn(images, 7)
        ),
        mask_only_round_u=0.5,
        cursor=DataCursor(7),
        classes=torch.from_numpy(generator.integers(-1, 3, size=masks)),
    )


def test_a_copy_to_the_cpu_is_waited_for(monkeypatch):
    queued = set()
    monkeypatch.setattr(
        torch.Tensor, "to", lambda each, _, non_blocking: queued.add(non_blocking) or each
    )
    batch_of([2, 1], 0).to("cpu")
    assert queued == {False}


@pytest.mark.slow
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 99), st.data())
@settings(max_examples=80, deadline=None)
def test_only_some_masks_are_what_plain_indexing_gives(counts, seed, data):
    batch = batch_of(counts, seed)
    chosen = sorted(data.draw(st.sets(st.integers(0, sum(counts) - 1)))) if sum(counts) else []
    some = batch.select(torch.tensor(chosen, dtype=torch.int64))
    assert torch.equal(some.dense(0, len(chosen)), batch.dense(0, sum(counts))[chosen])
    for number, mask in enumerate(chosen):
        assert torch.equal(some.dense(number, number + 1), batch.dense(mask, mask + 1)), (
            "also one by one"
        )
    assert (int(some.rle_offsets[0]), int(some.rle_offsets[-1])) == (0, len(some.rle_bounds))
    ours, theirs = some.random_inputs, batch.random_inputs
    for name in ("mask_image", "strata", "boxes_input", "classes"):
        assert torch.equal(getattr(some, name), getattr(batch, name)[chosen]), name
    for name in ("first_prompt", "clicks", "box_noise"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)[chosen]), name
    for name in ("drop_path", "patches"):
        assert getattr(ours, name) is getattr(theirs, name), "images stay"
    assert all(
        getattr(some, each.name) is getattr(batch, each.name)
        for each in fields(Batch)
        if each.name not in OF_MASKS
    )
    for name in OF_MASKS - {"random_inputs"}:
        assert getattr(some, name).dtype == getattr(batch, name).dtype


@pytest.mark.parametrize("counts", [[3, 1, 5], [2, 0, 4, 0], [0, 0], [1], []])
def test_the_padded_form_holds_what_the_flat_one_does_and_nothing_else(counts):
    batch = batch_of(counts, 2)
    padded, images, most = batch.padded(), len(counts), max(counts, default=0)
    assert padded.mask_counts.tolist() == counts
    assert padded.masks.shape == (images, most, GRID, GRID)
    assert padded.boxes_input.shape == (images, most, 4)
    assert torch.equal(padded.images, batch.images)
    assert torch.equal(padded.input_sizes, batch.input_sizes)
    real = torch.arange(most) < padded.mask_counts[:, None]
    assert torch.equal(padded.masks[real], batch.dense(0, len(batch.mask_image)))
    assert torch.equal(padded.boxes_input[real], batch.boxes_input)
    assert torch.equal(padded.classes[real], batch.classes)
    assert (padded.classes[~real] == -1).all()
    assert replace(batch, classes=None).padded().classes is None
    assert not padded.masks[~real].any()
    assert not padded.boxes_input[~real].any()


def test_copies_of_the_last_mask_are_in_no_sum():
    masks = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    boxes = torch.arange(12.0).view(3, 4)
    targets = Targets(masks, torch.ones_like(masks), boxes, (1.0, 1.0), torch.ones(3, 2))
    assert float(targets.count) == 3
    filled = targets.filled(5)
    assert filled.counted.tolist() == [True, True, True, False, False]
    assert torch.equal(filled.boxes_input, boxes[[0, 1, 2, 2, 2]])
    assert torch.equal(filled.masks, masks[[0, 1, 2, 2, 2]])
    assert filled.shift is None
    assert float(filled.count) == 3
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, torch.nan], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert filled.total(values).tolist() == [7.0, 3.0]
    assert targets.total(values[:, :3]).tolist() == [7.0, 3.0]
    assert targets.filled(3).counted.all()


@pytest.mark.parametrize("mode, spread", [("sample", (1, 26)), ("balanced", (12, 14))])
def test_branches_are_skipped_at_their_rates_and_as_many_if_balanced(mode, spread):
    """Of ViT-H's 32 blocks, 6.4 branches of either kind on average."""
    spec = RandomSpec(0, 0, blocks=32, drop_path_mode=mode, drop_path_rate=0.4)
    rates, draws = np.linspace(0, 0.4, 32)[:, None], 3000
    drawn = np.concatenate(
        [spec.draw_drop_path(make_rng(1, "drop_path", number)) for number in range(draws)]
    )
    assert drawn.dtype == np.float32
    assert 0 <= drawn.min() < drawn.max() <= 1
    skipped = drawn < rates
    apart = np.abs(skipped.mean(0) - rates) / np.sqrt(np.maximum(rates * (1 - rates), 1e-9) / draws)
    assert apart.max() < 4.5
    assert np.abs(drawn.mean(0) - 0.5).max() < 4.5 * (1 / 12 / draws) ** 0.5, "uniform"
    counts = skipped.sum((1, 2))
    assert (spread[0] <= counts.min()) & (counts.max() <= spread[1])
    assert (counts.max() - counts.min() <= 2) == (mode == "balanced")
    both = skipped[:, 30, 0] & skipped[:, 31, 1]
    assert abs(both.mean() - rates[30, 0] * rates[31, 0]) < 0.04, "branches are hardly related"
