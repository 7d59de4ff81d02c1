"""Training data on servers, as a user reaches it: an index of http:// and s3:// tars, statistics of
it, and the same batches as from a disk.
"""

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from gigamask.data import index as indexes
from gigamask.data.loader import SampleSource, batches
from gigamask.data.sample_config import SampleConfig
from gigamask.records import SampleRef, StepPlan
from gigamask.synthetic import scenes
from gigamask.types import Batch, RandomSpec
from tests.commands import invoke
from tests.journeys.runs import GIGAMASK
from tests.servers import FileServer, Hub, ObjectStore


@pytest.fixture(scope="module")
def tars(tmp_path_factory) -> Path:
    """A folder of three tars of four scenes each."""
    folder = tmp_path_factory.mktemp("tars")
    scenes.write(str(folder), 12, seed=2, shard_images=4)
    return folder


@pytest.fixture(scope="module", params=["http", "s3", "hf"])
def address(request, tars, tmp_path_factory):
    """The address of that folder on a server."""
    if request.param == "http":
        with FileServer(tars) as server:
            yield server.url
    elif request.param == "hf":
        root = tmp_path_factory.mktemp("hub")
        shutil.copytree(tars, root / "datasets/us/scenes/v1/deep")
        with Hub(root):
            yield "hf://datasets/us/scenes@v1/deep"
    else:
        with ObjectStore() as objects:
            for path in tars.iterdir():
                objects.put(path, f"deep/{path.name}")
            yield f"{objects.url}/deep"


def load(folder: Path, workers: int) -> list[Batch]:
    source = SampleSource(
        str(folder),
        SampleConfig(image_size=64, mask_size=32, max_masks=6),
        RandomSpec(seed=5, clicks=3, blocks=4),
    )
    steps = [[(3, 0, 11), (4, 5)], [(6, 7, 8), (1,)], [(2, 9), (10, 3, 3)]]
    groups = []
    for start, micros in zip((0, 5, 10), steps, strict=True):
        refs = (tuple(SampleRef(0, start + row, row) for row in micro) for micro in micros)
        groups.append(StepPlan(tuple(refs), start, start + 5))
    return [batch for step in batches(source, groups, workers=workers) for batch in step]


def check_same(one: Batch, other: Batch) -> None:
    for field in fields(Batch):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if field.name == "random_inputs":
            assert all(
                torch.equal(getattr(mine, each.name), getattr(theirs, each.name))
                for each in fields(mine)
            )
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs), field.name
        else:
            assert mine == theirs, field.name


def test_a_remote_index_and_its_batches_are_the_local_ones(tars, address, tmp_path, capsys):
    invoke(f"index {tars} --out {tmp_path}/here")
    invoke(f"index {address} --out {tmp_path}/there --json {tmp_path}/report.json")
    assert "12 images with" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["scanned"], report["reused"], report["images"]) == (3, 0, 12)
    here, there = indexes.Index.open(tmp_path / "here"), indexes.Index.open(tmp_path / "there")
    assert there.shard_paths == [f"{address}/{Path(path).name}" for path in here.shard_paths]
    for column in (tmp_path / "here").glob("*.npy"):
        assert column.read_bytes() == (tmp_path / "there" / column.name).read_bytes()
    expected = load(tmp_path / "here", 0)
    assert [len(batch.names) for batch in expected] == [3, 2, 3, 1, 2, 3]
    for workers in (0, 2):
        for one, other in zip(expected, load(tmp_path / "there", workers), strict=True):
            check_same(one, other)
    capsys.readouterr()
    invoke(f"stats {tmp_path}/there --json {tmp_path}/stats.json")
    assert "12 images" in capsys.readouterr().out
    invoke(f"index {address} {tmp_path}/here --out {tmp_path}/there")
    assert "0 scanned, 6 reused" in capsys.readouterr().out


@pytest.mark.long
def test_tars_are_indexed_by_several_processes(tars, tmp_path):
    with ObjectStore() as objects:
        for path in tars.iterdir():
            objects.put(path, path.name)
        words = (
            f"index {objects.url}/*.tar --out {tmp_path}/index --workers 2 --progress none".split()
        )
        done = subprocess.run([GIGAMASK, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "12 images" in done.stdout
    assert "3 scanned, 0 reused" in done.stdout


def test_a_flaky_server_changes_nothing(tars, tmp_path):
    invoke(f"index {tars} --out {tmp_path}/here")
    with FileServer(tars, busy=3) as server:
        invoke(f"index {server.url} --out {tmp_path}/there")
        server.drop_after, server.drops, server.busy = 1000, 4, 2
        for one, other in zip(load(tmp_path / "here", 0), load(tmp_path / "there", 0), strict=True):
            check_same(one, other)


def test_a_tar_that_went_away_loses_its_samples_only(tars, tmp_path):
    with FileServer(tars) as server:
        invoke(f"index {server.url} --out {tmp_path}/index")
        server.folder = tmp_path
        (tmp_path / "sa_000000.tar").write_bytes((tars / "sa_000000.tar").read_bytes())
        first = load(tmp_path / "index", 0)[0]
    assert first.names == ("sa_000000.tar:sa_3", "sa_000000.tar:sa_0")
    [skipped] = first.skipped
    assert skipped.name == "sa_000002.tar:sa_11"
    assert "sa_000002.tar: " in skipped.reason
    assert skipped.reason.endswith("check the URL")
