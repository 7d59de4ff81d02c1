"""Batches from an index, in this process and in others."""

import gc
import json
import multiprocessing
import os
import pickle
import signal
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import simplejpeg
import torch
from torch.utils.data._utils import signal_handling

from gigamask.data import index as indexes
from gigamask.data import tar
from gigamask.data.augment import ColorJitter, LargeScaleJitter
from gigamask.data.dataset import RawSample, build_sample
from gigamask.data.loader import SampleSource, batches, collate
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import open_sample_table
from gigamask.data.shards import ShardReader
from gigamask.interfaces import SampleTable
from gigamask.masks.rle import RLEMasks
from gigamask.records import DataCursor, ImageAnnotation, SampleRef, StepPlan
from gigamask.rng import make_rng
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from gigamask.synthetic.scenes import compose_scene, record, write
from gigamask.types import Batch, RandomSpec
from tests.errors import corrupt_sample, error_line
from tests.orders import iter_steps

ASSEMBLY = SampleConfig(image_size=128, mask_size=32, max_masks=6)
CHANCE = RandomSpec(seed=5, clicks=3, blocks=4)


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scenes"), 12, shard_images=6)


@pytest.fixture(scope="module")
def index(tars, tmp_path_factory):
    return indexes.build(tars, tmp_path_factory.mktemp("indexed") / "index")


@pytest.fixture(scope="module")
def source(index):
    return SampleSource(str(index.folder), ASSEMBLY, CHANCE)


@pytest.fixture
def swept():
    """Lets go of loaders that a traceback or a closed generator still holds, before another test
    forks with them."""
    yield
    gc.collect()


def step(*rows, samples=0):
    """One step whose micro-batches hold these rows."""
    sample_refs = [tuple(SampleRef(0, row, row) for row in micro) for micro in rows]
    return StepPlan(tuple(sample_refs), samples, samples + sum(map(len, rows)))


@pytest.mark.slow
def test_a_batch_holds_its_samples_side_by_side(source):
    [(batch,)] = batches(source, [step([4, 0, 9])])
    samples = [source.sample(SampleRef(0, row, row)) for row in (4, 0, 9)]
    assert (
        batch.names
        == tuple(sample.name for sample in samples)
        == ("sa_000000.tar:sa_4", "sa_000000.tar:sa_0", "sa_000001.tar:sa_9")
    )
    assert batch.images.shape == (3, 3, 128, 128)
    assert batch.input_sizes.tolist() == [list(sample.transform.resized) for sample in samples]
    assert np.allclose(batch.scale_xy, [sample.transform.scale_xy for sample in samples])
    assert batch.mask_image.tolist() == [
        i for i, sample in enumerate(samples) for _ in range(len(sample.masks))
    ]
    assert np.array_equal(
        batch.boxes_input.numpy(), np.concatenate([sample.boxes_input for sample in samples])
    )
    assert np.array_equal(
        batch.dense(0, len(batch.mask_image)).numpy(),
        np.concatenate([sample.masks.to_dense() for sample in samples]),
    )
    assert np.array_equal(
        batch.dense(2, 8).numpy(),
        np.concatenate([sample.masks.to_dense() for sample in samples])[2:8],
    )
    for name in ("first_prompt", "clicks", "box_noise", "drop_path"):
        assert torch.equal(
            getattr(batch.random_inputs, name),
            torch.cat([getattr(sample.random_inputs, name) for sample in samples]),
        )
    for image, sample in zip(batch.images, samples, strict=True):
        height, width = sample.transform.resized
        assert torch.equal(image[:, :height, :width], sample.image)
        assert not image[:, height:].any()
        assert not image[:, :, width:].any()
    assert batch.mask_size == 32
    assert batch.skipped == ()


@pytest.mark.slow
def test_a_step_shares_its_pause_and_its_cursor(source):
    steps = list(batches(source, [step([0, 1], [2]), step([3], [4, 5], samples=3)]))
    assert [len(micros) for micros in steps] == [2, 2]
    assert [{micro.cursor for micro in micros} for micros in steps] == [
        {DataCursor(3)},
        {DataCursor(6)},
    ]
    assert [{micro.mask_only_round_u for micro in micros} for micros in steps] == [
        {make_rng(5, "pause", start).random()} for start in (0, 3)
    ]


def test_an_empty_micro_batch_is_a_batch(source):
    [(batch, other)] = batches(source, [step([0], [])])
    assert len(batch.names) == 1
    check_empty(other)


def check_empty(batch):
    assert isinstance(batch, Batch)
    shapes = {
        "images": (0, 3, 128, 128),
        "input_sizes": (0, 2),
        "scale_xy": (0, 2),
        "mask_image": (0,),
        "boxes_input": (0, 4),
        "rle_bounds": (0,),
        "rle_offsets": (1,),
    }
    assert {name: tuple(getattr(batch, name).shape) for name in shapes} == shapes
    shapes = {
        "first_prompt": (0,),
        "clicks": (0, 3, 2),
        "box_noise": (0, 4),
        "drop_path": (0, 4, 2),
    }
    assert {name: tuple(getattr(batch.random_inputs, name).shape) for name in shapes} == shapes
    assert batch.dense(0, 0).shape == (0, 32, 32)


def test_an_image_whose_masks_all_go_stays_without_masks(index):
    source = SampleSource(
        str(index.folder), replace(ASSEMBLY, filters=MaskFilters(min_area=10**9)), CHANCE
    )
    [(batch,)] = batches(source, [step([0, 1])])
    assert len(batch.images) == 2
    assert batch.mask_image.shape == (0,)
    assert batch.random_inputs.drop_path.shape == (2, 4, 2)
    assert batch.dense(0, 0).shape == (0, 32, 32)


def test_a_source_travels_without_what_it_opened(source):
    source.sample(SampleRef(0, 0, 0))
    parcel = pickle.dumps(source)
    assert len(parcel) < 2000
    other = pickle.loads(parcel)
    assert other == source
    assert "index" not in vars(other)
    assert torch.equal(
        other.sample(SampleRef(0, 1, 1)).image, source.sample(SampleRef(0, 1, 1)).image
    )


@pytest.mark.slow
def test_masks_leave_a_worker_small():
    """64 masks as large as SA-1B's (the median covers (.061)^2 of the image) take at most 64 KB, on
    the grid of the loss and on that of the input."""
    height, width = 375, 562
    generator = make_rng(0, "ellipses")
    down, across = np.mgrid[:height, :width]
    masks = np.zeros((64, height, width), bool)
    for mask in masks:
        radius = 0.061 * np.exp(generator.normal(0, 0.8)) * np.sqrt(height * width / np.pi)
        y, x, stretch = generator.uniform((0, 0, 0.6), (height, width, 1.6))
        mask[:] = ((down - y) * stretch) ** 2 + ((across - x) / stretch) ** 2 <= max(radius, 2) ** 2
    scores = np.full(64, 0.9, np.float32)
    runs = RLEMasks.from_dense(masks)
    annotation = ImageAnnotation("a.tar:sa_0", (height, width), runs, scores, scores)
    jpg = simplejpeg.encode_jpeg(np.zeros((height, width, 3), np.uint8))
    for grid in (256, 1024):
        config = SampleConfig(image_size=1024, mask_size=grid, max_masks=64)
        sample = build_sample(jpg, annotation, SampleRef(0, 0, 0), config, CHANCE)
        batch = collate([sample], (), config, CHANCE, 0.0, DataCursor(1))
        assert len(batch.mask_image) > 60
        assert batch.rle_bounds.nbytes + batch.rle_offsets.nbytes <= 64 * 1024


def test_global_rngs_are_untouched(source):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for workers in (0, 1):
        list(batches(source, [step([0])], workers=workers))
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@pytest.mark.slow
def test_steps_may_be_without_end(source, swept):
    endless = batches(
        source,
        iter_steps(
            SampleSequence(Random(), SampleTable(12, {})), 0, batch_size=4, micro_batch_size=4
        ),
        workers=1,
    )
    taken = list(islice(endless, 5))
    endless.close()
    assert [micro.cursor.samples for (micro,) in taken] == [4, 8, 12, 16, 20]
    assert sorted(name for (micro,) in taken[:3] for name in micro.names) == sorted(
        {name for (micro,) in taken for name in micro.names}
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_user_can_mend_comes_as_one_line(tmp_path, workers, swept):
    source = SampleSource(str(tmp_path / "nowhere"), ASSEMBLY, CHANCE)
    with error_line("nowhere"):
        next(batches(source, [step([0])], workers=workers))


@dataclass(frozen=True)
class Deadly(SampleSource):
    def sample(self, ref, entry=None):
        if ref.row == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if ref.row == 5:
            os._exit(1)
        return super().sample(ref, entry)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row, cause",
    [(3, "often .* memory; .* --loader.workers to"), (5, "for an error .* above; .* again to")],
)
def test_a_dead_worker_is_named_with_what_was_waited_for(index, swept, row, cause):
    source = Deadly(str(index.folder), ASSEMBLY, CHANCE)
    steps = batches(source, [step([row, 4], samples=7)], workers=1)
    names = rf"sa_000000.tar:sa_{row}, sa_000000.tar:sa_4"
    message = rf"a loader worker died \(.* from 7 on .*\({names}\), {cause} continue"
    with error_line(message):
        next(steps)


def kill(worker) -> None:
    """Kills a process and returns when it is dead, but not reaped."""
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


KILLED = r"^a loader worker died \(.*(-9|Killed)\).*--loader.workers"


@pytest.mark.slow
def test_a_worker_that_is_killed_meanwhile_is_reported_with_the_next_batch(source, swept):
    """Not in the midst of a training step, where torch's handler of SIGCHLD would raise."""
    steps = batches(source, (step([n % 12], samples=n) for n in range(100)), workers=1)
    next(steps)
    [worker] = multiprocessing.active_children()
    kill(worker)
    assert sum(n for n in range(1000)) == 499500  # signals are handled between bytecodes
    with error_line(KILLED):
        list(steps)
    assert not multiprocessing.active_children()
    assert getattr(signal.getsignal(signal.SIGCHLD), "__self__", None) is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_is_killed_while_it_starts_is_reported(source, swept, workers):
    def plans():
        kill(multiprocessing.active_children()[0])
        yield step([0])

    with error_line(KILLED):
        list(batches(source, plans(), workers=workers))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_of_two_loaders_one_reports_its_dead_worker(source, swept):
    outer, inner = (
        batches(source, (step([n % 12], samples=n) for n in range(9)), workers=1) for _ in range(2)
    )
    next(outer)
    [worker] = multiprocessing.active_children()
    next(inner)
    kill(worker)
    assert len(list(inner)) == 8
    with error_line(KILLED):
        list(outer)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_survives_a_signal_while_it_starts(source, monkeypatch, number):
    """As when a terminal or a batch system signals all processes just then."""
    torch_handlers = signal_handling._set_worker_signal_handlers

    def signalled() -> None:
        torch_handlers()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signalled)
    [(batch,)] = batches(source, [step([0])], workers=1)
    assert len(batch.names) == 1


@dataclass(frozen=True)
class Wrong(SampleSource):
    def sample(self, ref, entry=None):
        raise RuntimeError("not of a worker's death")


def test_bug_is_not_reported_as_corrupt_data(index):
    with pytest.raises(RuntimeError, match="not of a worker's death"):
        next(batches(Wrong(str(index.folder), ASSEMBLY, CHANCE), [step([0])]))


def test_every_tensor_moves(source):
    [(batch,)] = batches(source, [step([0])])
    moved = batch.to("meta")
    values = vars(moved) | vars(moved.random_inputs)
    places = {name: x.device.type for name, x in values.items() if isinstance(x, torch.Tensor)}
    assert {name for name, place in places.items() if place == "cpu"} == {
        "rle_offsets",  # says where to cut, and is read without waiting for the device
        "drop_path",  # says which branches are not computed
    }
    assert len(places) == 15


PLAIN = replace(ASSEMBLY, with_masks=False)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory, jpg):
    """A tar with no json at all, and one with jsons for some of its images, one of which is no
    picture."""
    folder = tmp_path_factory.mktemp("unlabelled")
    tar.write(folder / "a.tar", [(f"x_{n}.jpg", jpg(40 + n, 60, n)) for n in range(3)])
    note = {
        "image": {"image_id": 4, "width": 60, "height": 44, "file_name": "x_4.jpg"},
        "annotations": [],
    }
    scene = compose_scene(0, 5)
    last = simplejpeg.encode_jpeg(scene.pixels), json.dumps(record(scene, 5)).encode()
    broken = jpg(43, 60)[:1500]  # its header is whole
    members = [
        ("x_3.jpg", broken),
        ("x_4.jpg", jpg(44, 60)),
        ("x_4.json", json.dumps(note).encode()),
        ("sa_5.jpg", last[0]),
        ("sa_5.json", last[1]),
    ]
    tar.write(folder / "b.tar", members)
    return indexes.build(folder, folder / "index")


def test_an_image_without_json_has_no_sample_with_masks(unlabelled):
    source = SampleSource(str(unlabelled.folder), ASSEMBLY, CHANCE)
    with corrupt_sample(r"a\.tar:x_0"):
        source.sample(SampleRef(0, 0, 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_without_masks_every_image_is_a_sample_and_a_broken_one_is_left_out(unlabelled, workers):
    chance = RandomSpec(seed=5, clicks=3, blocks=4, patches=16)
    source = SampleSource(str(unlabelled.folder), PLAIN, chance)
    rows = open_sample_table(unlabelled, MaskFilters(), with_masks=False).rows_or_offsets.tolist()
    assert rows == list(range(6))
    [(batch, other)] = batches(source, [step(rows, rows[3:4])], workers=workers)
    assert batch.names == ("a.tar:x_0", "a.tar:x_1", "a.tar:x_2", "b.tar:x_4", "b.tar:sa_5")
    [skipped] = batch.skipped
    assert skipped.name == "b.tar:x_3"
    assert "b.tar:x_3: the JPEG of 1500 bytes" in skipped.reason
    assert other.skipped == (skipped,)
    check_empty(other)
    assert batch.mask_image.shape == batch.strata.shape == (0,)
    assert batch.boxes_input.shape == (0, 4)
    assert batch.batch_index.shape == (5,)
    draws = {name: tuple(each.shape) for name, each in vars(batch.random_inputs).items()}
    assert draws == {
        "first_prompt": (0,),
        "clicks": (0, 3, 2),
        "box_noise": (0, 4),
        "drop_path": (5, 4, 2),
        "patches": (5, 16),
    }
    assert torch.equal(
        batch.random_inputs.patches[3],
        torch.from_numpy(make_rng(5, "patches", 0, 4).random((1, 16), dtype=np.float32))[0],
    )
    assert batch.dense(0, 0).shape == (0, 32, 32)


@pytest.mark.slow
def test_what_is_seen_does_not_depend_on_masks(index):
    varied = replace(ASSEMBLY, augment=LargeScaleJitter(), color_jitter=ColorJitter(brightness=0.3))
    sample_refs = [SampleRef(2, row, row, stratum=1) for row in range(12)]
    for ref in sample_refs:
        with_masks = SampleSource(str(index.folder), varied, CHANCE).sample(ref)
        without = SampleSource(str(index.folder), replace(varied, with_masks=False), CHANCE).sample(
            ref
        )
        assert torch.equal(with_masks.image, without.image)
        assert (with_masks.transform, with_masks.name) == (without.transform, without.name)
        assert torch.equal(with_masks.random_inputs.drop_path, without.random_inputs.drop_path)
        assert len(without.masks) == len(without.strata) == 0
        assert without.boxes_input.shape == (0, 4)


def test_without_masks_no_json_is_read(index, monkeypatch):
    spans, plain = [], ShardReader._read_spans
    monkeypatch.setattr(
        ShardReader,
        "_read_spans",
        lambda self, index, given: spans.extend(given) or plain(self, index, given),
    )
    source = SampleSource(str(index.folder), PLAIN, CHANCE)
    list(batches(source, [step([0, 5])]))
    source.sample(SampleRef(0, 7, 7))
    at, size = index.images["jpg_offset"], index.images["jpg_bytes"]
    assert [(start, stop) for _, start, stop in spans] == [
        (at[row], at[row] + size[row]) for row in (0, 5, 7)
    ]


def test_changed_image_is_detected_by_its_size(unlabelled, jpg):
    source = SampleSource(str(unlabelled.folder), PLAIN, CHANCE)
    with corrupt_sample(r"a.tar:x_0.*JPEG.*9 x 8.*40 x 60"):
        source.sample(SampleRef(0, 0, 0), RawSample("a.tar:x_0", jpg(9, 8), None))
