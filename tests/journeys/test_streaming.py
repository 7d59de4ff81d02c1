"""Training that goes through remote tars in sequence: every sample once, every byte about once,
resumed in mid-tar; and from a mask store.
"""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from gigamask.data import index as indexes
from gigamask.data import loader
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import open_sample_table
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.shards import Streamed
from gigamask.synthetic import scenes
from gigamask.types import RandomSpec
from tests.commands import LITTLE, invoke, refusal
from tests.orders import iter_steps
from tests.servers import FileServer


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    """A folder of three tars of eight scenes each, and an index of them as they are on
    this disk."""
    folder = tmp_path_factory.mktemp("tars")
    scenes.write(str(folder), 24, seed=4, shard_images=8)
    return folder


def weights(run: Path) -> list[bytes]:
    """The files of a run's last checkpoint."""
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    files = [path.read_bytes() for path in sorted(last.glob("*.safetensors"))]
    assert files
    return files


def names_of_epoch(
    index: indexes.Index, workers: int, world: int, start: int, read_ahead: int
) -> list[str]:
    """The samples that all ranks together are given from `start` to the end of the first epoch."""
    found = open_sample_table(index, MaskFilters())
    sampler, micro, batch = Streamed(lanes=world * 2 * max(workers, 1), buffer=1), 2, 4
    sequence = SampleSequence(sampler, found.items, locate=found.locate)
    source = loader.SampleSource(
        str(index.folder),
        SampleConfig(image_size=32, mask_size=8, max_masks=2),
        RandomSpec(0, 1, 1),
        read_ahead,
        2 * micro,
    )
    names = []
    for rank in range(world):
        groups = islice(
            iter_steps(sequence, start, batch, micro, rank, world), (len(index) - start) // batch
        )
        for step in loader.batches(source, groups, workers=workers):
            names += [name for made in step for name in made.names]
    return names


@pytest.mark.parametrize("workers, world", [(0, 1), (2, 1), (0, 2)])
def test_a_streamed_epoch_fetches_large_blocks_and_every_sample_once(
    tars, tmp_path, workers, world
):
    with FileServer(tars) as server:
        index = indexes.build(
            [f"{server.url}/{path.name}" for path in sorted(tars.glob("*.tar"))], tmp_path / "index"
        )
        everything = sorted(index.entry_name(row) for row in range(len(index)))
        bytes_of_tars = sum(path.stat().st_size for path in tars.glob("*.tar"))
        asked, sent = len(server.asked), server.bytes_sent
        read_ahead = 2**17
        assert sorted(names_of_epoch(index, workers, world, 0, read_ahead)) == everything
        blocks = bytes_of_tars / read_ahead
        ends = 2 * 2 * world * max(workers, 1)  # each lane begins and ends within a block
        assert len(server.asked) - asked <= blocks + ends + len(index.shard_paths)
        assert server.bytes_sent - sent <= bytes_of_tars + ends * read_ahead
        resumed = names_of_epoch(index, workers, world, 8, read_ahead)
        assert len(resumed) == len(set(resumed)) == len(everything) - 8


def test_training_goes_through_tars_on_a_server_and_resumes_in_mid_tar(tars, tmp_path):
    # A rate that does not depend on the number of steps, and a warm-up that two steps do not
    # shorten, so that a run of two can become one of four.
    flags = (
        "--sampler streamed --sampler.lanes 2 --sampler.buffer 3 "
        "--schedule.min-lr-ratio 1 --schedule.warmup-steps 0"
    )
    with FileServer(tars) as server:
        data = " ".join(f"{server.url}/{path.name}" for path in sorted(tars.glob("*.tar")))
        remote = f"train {LITTLE} --data {data} {flags} --out {tmp_path}/remote"
        remote += " --loader.read-ahead-mb 1"
        invoke(remote, "--steps 2")
        invoke(remote, "--steps 4")
    invoke(f"train {LITTLE} --data {tars}", flags, f"--out {tmp_path}/local --steps 4")
    assert weights(tmp_path / "remote") == weights(tmp_path / "local")


def test_training_from_a_mask_store_is_training_from_json(tars, tmp_path):
    invoke(f"index {tars} --out {tmp_path}/index")
    invoke(f"masks {tmp_path}/index --out {tmp_path}/store --mask-size 32 --image-size 64")
    flags = f"train {LITTLE} --data {tmp_path}/index --loader.augment none"
    invoke(flags, f"--out {tmp_path}/json")
    invoke(flags, f"--out {tmp_path}/stored --loader.mask-store {tmp_path}/store")
    assert weights(tmp_path / "json") == weights(tmp_path / "stored")


def test_data_that_have_changed_are_not_trained_on_unasked(tars, tmp_path, capsys):
    data = tmp_path / "data"
    shutil.copytree(tars, data)
    command = f"train {LITTLE} --data {data} --out {tmp_path}/run"
    invoke(command, "--steps 1")
    shutil.copy(data / "sa_000000.tar", data / "another.tar")
    error = refusal(capsys, command, "--steps 2")
    assert "24 images in 3 tars" in error
    assert "32 images in 4 tars" in error
    invoke(command, "--steps 2 --allow-data-change")
    invoke(command, "--steps 3")
