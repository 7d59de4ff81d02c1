"""The padded form of a batch holds what the flat one does."""

import numpy as np
import pytest
import torch

from gigamask.contracts import Chance, Cursor, Entry, Visit
from gigamask.data.assemble import assemble
from gigamask.data.loader import collate
from gigamask.data.settings import Assembly
from gigamask.geometry.runs import Runs

CHANCE = Chance(seed=0, clicks=1, blocks=1)
ASSEMBLY = Assembly(side=64, grid=16, max_masks=9)


def batch_of(jpg, counts):
    samples = []
    for position, count in enumerate(counts):
        masks = np.zeros((count, 40, 60), bool)
        for number in range(count):
            masks[number, 4 * number : 4 * number + 8, 5 : 9 + 6 * number] = True
        scores = np.full(count, 0.9, np.float32)
        entry = Entry(f"x.tar:{position}", (40, 60), Runs.from_dense(masks), scores, scores)
        samples.append(assemble(jpg(40, 60, position), entry, Visit(0, position, 0), ASSEMBLY, CHANCE))
    return collate(samples, (), ASSEMBLY, CHANCE, 0.5, Cursor(len(samples)))


@pytest.mark.parametrize("counts", [[3, 1, 5], [2, 0, 4, 0], [0, 0], [1], []])
def test_nothing_is_lost_and_nothing_is_added(jpg, counts):
    batch = batch_of(jpg, counts)
    padded = batch.padded()
    images, most = len(counts), max(counts, default=0)
    assert padded.mask_counts.tolist() == counts
    assert padded.masks.shape == (images, most, 16, 16)
    assert padded.boxes_input.shape == (images, most, 4)
    assert torch.equal(padded.images, batch.images)
    assert torch.equal(padded.input_sizes, batch.input_sizes)
    real = torch.arange(most) < padded.mask_counts[:, None]
    assert torch.equal(padded.masks[real], batch.dense(0, len(batch.mask_image)))
    assert torch.equal(padded.boxes_input[real], batch.boxes_input)
    assert not padded.masks[~real].any()
    assert not padded.boxes_input[~real].any()
    if sum(counts):
        assert padded.masks[real].any((1, 2)).all()
