"""A flipped bit in any file of an index, of a run's own index, of an interrupted build or of a mask
store is found and named when what it damages is used, or changes nothing.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data import mask_store
from gigamask.data.dataset import Sa1bDataset
from gigamask.data.index import Index
from gigamask.data.mask_store import MaskStore
from gigamask.data.sample_config import SampleConfig
from gigamask.errors import GigamaskError
from gigamask.records import SampleRef
from gigamask.synthetic import scenes
from gigamask.types import RandomSpec

FLIPS = 6
"""Flipped bits per file."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tars of four scenes, their index, a run's own index of them, and a mask store."""
    folder = tmp_path_factory.mktemp("made")
    scenes.write(folder / "tars", 4, shard_images=2)
    index = indexes.build(folder / "tars", folder / "index")
    indexes.open_or_build(folder / "tars", folder / "own")
    mask_store.build(index, folder / "store", 32, 128)
    return folder


def contents(index: Index) -> tuple:
    """Everything that an index says, and a sample that is read with it."""
    columns = [
        (name, column[:].tolist()) for name, column in {**index.images, **index.masks}.items()
    ]
    row = index.find(index.entry_name(3))
    entry = Sa1bDataset(index)[row].annotation
    return columns, index.report(), index.digest, row, entry.masks.bounds.tolist()


def use_index(folder: Path) -> tuple:
    return contents(Index.open(folder / "index"))


def use_own_index(folder: Path) -> tuple:
    return contents(indexes.open_or_build(folder / "tars", folder / "own"))


def use_store(folder: Path) -> tuple:
    index = Index.open(folder / "index")
    store = MaskStore.open(folder / "store", index)
    config = SampleConfig(image_size=128, mask_size=32)
    raw = Sa1bDataset(index)
    samples = [
        store.sample(
            raw.read(row, with_json=False).jpg,
            SampleRef(0, row, row),
            config,
            RandomSpec(seed=1, clicks=2, blocks=2),
        ).masks.bounds.tolist()
        for row in range(len(index))
    ]
    return samples, store.manifest


def flip_bits(
    files: list[Path], use: Callable[[], tuple], random: np.random.Generator
) -> tuple[int, int]:
    """Flip bits one at a time; return the numbers of flips and of those that were named."""
    right, tried, found = use(), 0, 0
    for path in files:
        whole = path.read_bytes()
        for bit in random.integers(0, 8 * len(whole), FLIPS):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            tried += 1
            try:
                assert use() == right, f"bit {bit} of {path.name} changes what is read"
            except GigamaskError as error:
                found += 1
                assert path.stem in str(error) or str(path.parent) in str(error)  # noqa: PT017
            path.write_bytes(whole)
    return tried, found


@pytest.mark.parametrize("kind", ["index", "store"])
def test_flips_are_found_when_used(made, kind, record_property):
    use = {"index": use_index, "store": use_store}[kind]
    files = sorted((made / kind).iterdir())
    tried, found = flip_bits(files, lambda: use(made), np.random.default_rng(0))
    record_property("tried", tried)
    assert tried == found == FLIPS * len(files)


@pytest.mark.long
def test_a_run_builds_its_own_index_again(made, record_property):
    files = [path for path in sorted((made / "own").rglob("*")) if path.is_file()]
    tried, found = flip_bits(files, lambda: use_own_index(made), np.random.default_rng(0))
    record_property("tried", tried)
    assert found == 0


def test_damaged_shards_of_an_interrupted_build_are_scanned_again(made, monkeypatch):
    out = made / "built"

    def stop(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(indexes, "merge", stop)
    with pytest.raises(KeyboardInterrupt):
        indexes.build(made / "tars", out)
    monkeypatch.undo()
    parts = made / ".built.parts"
    kept = made / "kept"
    shutil.move(parts, kept)
    random = np.random.default_rng(0)
    for path in sorted(path.relative_to(kept) for path in kept.rglob("*") if path.stat().st_size):
        if not (kept / path).is_file():
            continue
        shutil.copytree(kept, parts)
        shutil.rmtree(out, ignore_errors=True)
        flipped = bytearray((parts / path).read_bytes())
        flipped[random.integers(len(flipped))] ^= 1 << random.integers(8)
        (parts / path).write_bytes(flipped)
        built = indexes.extend(made / "tars", out)
        assert (built.scanned, built.reused) == (1, 1), path
        assert contents(built.index) == use_index(made)
