"""What a loader delivers depends on the samples alone: not on workers, ranks, micro-batches, or
where training was interrupted.
"""

from dataclasses import fields, replace
from itertools import islice

import pytest
import torch

from gigamask.data import index as indexes
from gigamask.data.augment import HorizontalFlip
from gigamask.data.loader import SampleSource, batches
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import open_sample_table
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from gigamask.synthetic.scenes import write
from gigamask.types import Batch, RandomInputs, RandomSpec
from tests.orders import iter_steps

STEPS = 5


@pytest.fixture(scope="module")
def deliver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    index = indexes.build(write(folder, 7, shard_images=4), folder / "index")
    source = SampleSource(
        str(index.folder),
        SampleConfig(image_size=96, mask_size=24, max_masks=4, augment=HorizontalFlip()),
        RandomSpec(seed=1, clicks=2, blocks=2),
    )
    found = open_sample_table(index, MaskFilters())

    def run(steps=STEPS, samples=0, workers=0, drop_path_mode="sample", **cut):
        cut = {"batch_size": 6, "micro_batch_size": 6} | cut
        spec = replace(source.random_spec, drop_path_mode=drop_path_mode)
        order = iter_steps(
            SampleSequence(Random(), found.items, locate=found.locate), samples, **cut
        )
        made = batches(replace(source, random_spec=spec), order, workers=workers)
        return list(islice(made, steps))

    return run


def contents(batch):
    """Everything in a batch, tensors as bytes with their shape."""
    parts = [getattr(batch, field.name) for field in fields(Batch)] + [
        getattr(batch.random_inputs, field.name) for field in fields(RandomInputs)
    ]
    return [
        (part.dtype, tuple(part.shape), part.numpy().tobytes())
        if isinstance(part, torch.Tensor)
        else part
        for part in parts
        if not isinstance(part, RandomInputs)
    ]


def join(micros):
    """The micro-batches as one batch: names, images, and masks with everything that is theirs."""
    names = [name for micro in micros for name in micro.names]
    masks = [
        (names_of(micro, k), micro.dense(k, k + 1).numpy().tobytes())
        for micro in micros
        for k in range(len(micro.mask_image))
    ]
    tensors = [
        torch.cat([part(micro) for micro in micros])
        for part in (
            lambda m: m.images,
            lambda m: m.boxes_input,
            lambda m: m.random_inputs.clicks,
            lambda m: m.random_inputs.drop_path,
        )
    ]
    return names, masks, [tensor.numpy().tobytes() for tensor in tensors]


def names_of(micro, mask):
    return micro.names[int(micro.mask_image[mask])]


# Where there are fewer cores than workers torch advises against it.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("micro", [6, 4])
def test_workers_change_nothing(deliver, micro):
    here = [[contents(batch) for batch in step] for step in deliver(micro_batch_size=micro)]
    for workers in (1, 3):
        assert [
            [contents(batch) for batch in step]
            for step in deliver(micro_batch_size=micro, workers=workers)
        ] == here


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_are_one_batch(deliver, micro):
    assert [join(step) for step in deliver(micro_batch_size=micro)] == [
        join(step) for step in deliver()
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_partition_each_batch(deliver, world):
    ranks = [deliver(rank=rank, world_size=world, micro_batch_size=2) for rank in range(world)]
    for step, whole in enumerate(deliver()):
        names, masks, _ = join(whole)
        parts = [join(rank[step]) for rank in ranks]
        assert all(parts[rank][0] == names[rank::world] for rank in range(world))
        assert sorted(mask for part in parts for mask in part[1]) == sorted(masks)
        assert len({batch.mask_only_round_u for rank in ranks for batch in rank[step]}) == 1
        assert {batch.cursor for rank in ranks for batch in rank[step]} == {whole[0].cursor}


@pytest.mark.parametrize("taken", [1, 2, 4])
def test_resuming_gives_the_same_rest(deliver, taken):
    whole = deliver()
    cursor = whole[taken - 1][-1].cursor
    assert [
        [contents(batch) for batch in step]
        for step in deliver(STEPS - taken, cursor.samples, workers=1)
    ] == [[contents(batch) for batch in step] for step in whole[taken:]]


def test_all_images_of_a_step_skip_the_same_branches(deliver):
    """On all ranks, in all micro-batches, and where a training is resumed."""
    mode = {"drop_path_mode": "batch"}
    whole = deliver(**mode)
    drawn = [batch.random_inputs.drop_path[0] for (batch,) in whole]
    assert not any(map(torch.equal, drawn[:-1], drawn[1:])), "each step draws anew"
    for (one,), (other,) in zip(deliver(), whole, strict=True):
        inputs = replace(other.random_inputs, drop_path=one.random_inputs.drop_path)
        assert contents(replace(other, random_inputs=inputs)) == contents(one), "all else stays"
    cuts = [
        deliver(rank=rank, world_size=4, micro_batch_size=1, workers=rank % 2, **mode)
        for rank in range(4)
    ]
    cuts.append(deliver(STEPS - 2, whole[1][0].cursor.samples, micro_batch_size=4, **mode))
    for steps in cuts:
        for micro_batches, numbers in zip(steps, drawn[-len(steps) :], strict=True):
            for batch in micro_batches:
                expected = numbers.expand(len(batch.names), -1, -1)
                assert torch.equal(batch.random_inputs.drop_path, expected)


def test_an_epoch_visits_every_image_once_and_draws_anew_in_the_next(deliver):
    steps = deliver(steps=2, batch_size=7, micro_batch_size=7)
    first, second = (batch for (batch,) in steps)
    assert sorted(first.names) == sorted(second.names)
    assert len(set(first.names)) == 7
    assert first.mask_only_round_u != second.mask_only_round_u
    assert not torch.equal(first.random_inputs.drop_path, second.random_inputs.drop_path)
