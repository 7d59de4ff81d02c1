"""Building, opening and verifying a mask store; that its samples equal those from the json is in
tests/laws/test_mask_store.py.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from gigamask.cli.commands.masks import MasksCommand
from gigamask.data import index, mask_store, mask_store_shard, tar
from gigamask.data.augment import HorizontalFlip, LargeScaleJitter, NoAugment, ScaleJitter
from gigamask.data.mask_store import MaskStore
from gigamask.data.sample_config import SampleConfig
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError
from gigamask.masks.rle import RLEMasks
from gigamask.records import SampleRef
from gigamask.types import RandomSpec
from tests.errors import corrupt_sample, error_line

GRID, SIDE = 32, 128
CHANCE = RandomSpec(seed=1, clicks=2, blocks=2)
SETTINGS = SampleConfig(image_size=SIDE, mask_size=GRID)


def scene(record, number, size, count=5):
    random = np.random.default_rng(number)
    masks = np.zeros((count, *size), bool)
    for mask in masks:
        y, x = random.integers(0, size[0] - 9), random.integers(0, size[1] - 9)
        mask[y : y + random.integers(3, 40), x : x + random.integers(3, 40)] = True
    raw = simplejpeg.encode_jpeg(random.integers(0, 256, (*size, 3), dtype=np.uint8), quality=80)
    return [
        (f"sa_{number}.jpg", raw),
        (f"sa_{number}.json", json.dumps(record(masks, number)).encode()),
    ]


@pytest.fixture(scope="module")
def tars(tmp_path_factory, record):
    """Two tars: landscapes, portraits and a square; an image without masks and one
    without a json."""
    folder = tmp_path_factory.mktemp("tars")
    sizes = [(60, 90), (90, 61), (50, 50), (97, 70), (70, 100), (80, 61)]
    parts = [scene(record, number, size) for number, size in enumerate(sizes)]
    tar.write(folder / "a.tar", [*parts[0], *scene(record, 6, (40, 40), 0), *parts[1], *parts[2]])
    tar.write(folder / "b.tar", [*parts[3], *scene(record, 7, (40, 40))[:1], *parts[4], *parts[5]])
    return [folder / "a.tar", folder / "b.tar"]


@pytest.fixture(scope="module")
def opened(tars, tmp_path_factory):
    return index.build(tars, tmp_path_factory.mktemp("index") / "index")


@pytest.fixture(scope="module")
def built(opened, tmp_path_factory):
    return mask_store.build(
        opened, tmp_path_factory.mktemp("store") / "store", GRID, SIDE, mirrored=True
    )


def build(opened, folder: Path, **options) -> MaskStore:
    """Build a store of the index in the folder."""
    return mask_store.build(opened, folder / "store", GRID, SIDE, **options)


@pytest.fixture
def copied(built, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(built.folder, tmp_path / "store")


def stored(store, row, settings=SETTINGS, position=0):
    images = store.index.images
    places = (int(images[name][row]) for name in ("shard", "jpg_offset", "jpg_bytes"))
    jpg = ShardReader(store.index.shard_paths).read(*places)
    return store.sample(jpg, SampleRef(0, position, row), settings, CHANCE)


@pytest.mark.parametrize("grid", [1, 5, 8, 13, 64])
def test_packed_masks_come_back(grid):
    masks = (
        np.random.default_rng(grid).random((9, grid, grid)) < np.linspace(0, 1, 9)[:, None, None]
    )
    runs = RLEMasks.from_dense(masks)
    packed = mask_store_shard.pack(runs)
    assert packed.shape == (9, -(-grid * grid // 64))
    back = mask_store_shard.unpack(packed, grid)
    assert back.size == runs.size
    for name in ("bounds", "offsets"):
        assert np.array_equal(getattr(back, name), getattr(runs, name))
        assert getattr(back, name).dtype == getattr(runs, name).dtype
    assert len(mask_store_shard.unpack(packed[:0], grid)) == 0


def test_the_files_are_one_bit_a_cell(built, opened):
    plain, doubled = 30, 10  # six scenes of five masks, of which two end between cells
    files = sorted(path.name for path in built.folder.iterdir())
    assert len(files) == 7
    assert "manifest.json" in files
    rows = sum(len(np.load(path)) for path in built.folder.glob("*.bits.npy"))
    assert rows == plain + doubled
    assert built.bytes == rows * GRID * GRID // 8 + 2 * (128 + 8)
    assert opened.manifest.masks == plain


def test_a_build_goes_on_where_it_stopped(opened, tmp_path, monkeypatch):
    real, made = mask_store_shard.build_shard, []

    def dies_second(*job):
        if made:
            raise KeyboardInterrupt
        made.append(job[-1])
        real(*job)

    monkeypatch.setattr(mask_store_shard, "build_shard", dies_second)
    with pytest.raises(KeyboardInterrupt):
        build(opened, tmp_path)
    with error_line(r"b.tar.*'gigamask masks"):
        MaskStore.open(tmp_path / "store", opened)
    monkeypatch.setattr(
        mask_store_shard, "build_shard", lambda *job: (made.append(job[-1]), real(*job))
    )
    # What a killed process leaves behind.
    (
        tmp_path
        / "store"
        / f".{mask_store_shard.shard_key(mask_store_shard.describe_tars(opened)[1])}"
    ).mkdir()
    seen = []
    mask_store.build(
        opened, tmp_path / "store", GRID, SIDE, progress=lambda *done: seen.append(done)
    )
    assert made == [0, 1]
    assert seen == [(1, 1)]
    build(opened, tmp_path)
    assert made == [0, 1]
    assert not list((tmp_path / "store").glob(".*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_processes_build_the_same_bytes(opened, built, tmp_path):
    build(opened, tmp_path, mirrored=True, workers=2)
    for path in built.folder.iterdir():
        assert (tmp_path / "store" / path.name).read_bytes() == path.read_bytes()


def test_a_store_serves_other_indexes_of_its_tars(built, tars, tmp_path):
    moved = shutil.copytree(tars[1].parent, tmp_path / "moved", copy_function=shutil.copy2)
    other = index.build([moved / "b.tar"], tmp_path / "index")
    store = MaskStore.open(built.folder, other)
    for row in range(len(other)):
        name = other.entry_name(row)
        assert np.array_equal(
            stored(store, row).masks.bounds, stored(built, built.index.find(name)).masks.bounds
        )


def test_a_flipped_bit_is_named_by_block(copied, opened):
    path = next(copied.glob("b-*.bits.npy"))
    whole = bytearray(path.read_bytes())
    whole[-12] ^= 128
    path.write_bytes(whole)
    damaged = r"b-\w+.bits.npy: bytes 128 to \d+ were changed \(crc32\)"
    with error_line(damaged):
        MasksCommand(paths=(str(opened.folder),), out=str(copied), verify=True).run()
    store = MaskStore.open(copied, opened)
    with error_line(damaged):
        store.masks(len(opened) - 1, np.array([0]))


@pytest.mark.parametrize("kind", ["bits.npy", "rows.npy", "json"])
@pytest.mark.parametrize("keep", [0, 50, -8])
def test_a_file_that_is_cut_short_is_found_at_once_and_built_again(copied, opened, kind, keep):
    path = next(copied.glob(f"a-*.{kind}" if kind != "json" else "a-*.json"))
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with error_line(r"a-\w+.json.*'gigamask masks"):
        MaskStore.open(copied, opened)
    assert len(mask_store.verify(opened, copied)) == 1
    mask_store.build(opened, copied, GRID, SIDE, mirrored=True)
    assert path.read_bytes() == whole


def test_bits_of_another_grid_are_found(copied, opened, tmp_path):
    other = mask_store.build(opened, tmp_path / "other", 16, SIDE, mirrored=True)
    name = next(copied.glob("a-*.bits.npy")).name
    shutil.copy(other.folder / name, copied / name)
    with error_line(r"a-\w+.bits.npy: has \d+ bytes"):
        MaskStore.open(copied, opened)


def test_a_piece_of_another_tar_is_found(copied, opened):
    path = next(copied.glob("a-*.json"))
    path.write_bytes(next(copied.glob("b-*.json")).read_bytes())
    with error_line(r"a-\w+.json.*a.tar"):
        MaskStore.open(copied, opened)


def test_what_is_no_store_is_refused(opened, tmp_path):
    with error_line(r"nowhere.*'gigamask masks"):
        MaskStore.open(tmp_path / "nowhere", opened)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with error_line(r"full"):
        mask_store.build(opened, tmp_path / "full")


def test_a_store_of_another_kind_is_refused(built, copied, opened):
    with error_line(
        r"--mask-size 32 --image-size 128 --mirrored"
        r".*--mask-size 64 --image-size 128 --no-mirrored"
    ):
        mask_store.build(opened, built.folder, 64, SIDE)
    raw = (copied / "manifest.json").read_bytes()
    (copied / "manifest.json").write_bytes(
        raw.replace(b'"gigamask_masks":2', b'"gigamask_masks":9')
    )
    with error_line(r"schema.*9"):
        MaskStore.open(copied, opened)


@pytest.mark.parametrize("grid, side", [(0, 128), (-1, 128), (5000, 128), (32, 0)])
def test_a_grid_that_is_none_is_refused(opened, tmp_path, grid, side):
    flag, value = ("image", side) if grid == 32 else ("mask", grid)
    with error_line(rf"--{flag}-size must be .*\(got {value}\)"):
        mask_store.build(opened, tmp_path / "store", grid, side)


def test_too_little_disk_space_is_an_error_before_writing(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 10)
    )
    with error_line(r"0.0 GB.*0.0 GB"):
        build(opened, tmp_path)
    assert not list((tmp_path / "store").iterdir())


def test_a_tar_that_changed_under_its_index_is_refused(tars, tmp_path, record):
    path = shutil.copy2(tars[0], tmp_path / "a.tar")
    opened = index.build([path], tmp_path / "index")
    raw, status = path.read_bytes(), path.stat()
    place = slice(
        int(opened.images["json_offset"][0]),
        int(opened.images["json_offset"][0] + opened.images["json_bytes"][0]),
    )
    fewer = json.loads(raw[place])
    fewer["annotations"].pop()
    path.write_bytes(
        raw[: place.start]
        + json.dumps(fewer).encode().ljust(place.stop - place.start)
        + raw[place.stop :]
    )
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with error_line(r"a.tar:sa_0.*4.*5"):
        build(opened, tmp_path)


def test_a_json_that_cannot_be_read_ends_the_build(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(
        mask_store_shard.storage,
        "read_ranges",
        lambda places: (
            [CorruptSampleError(f"{places[0].path}: cannot be read; check the disk")] * len(places)
        ),
    )
    with corrupt_sample(r"a.tar"):
        build(opened, tmp_path)
    with error_line(r"lacks the masks of a.tar"):
        MaskStore.open(tmp_path / "store", opened)


def test_settings_that_a_store_cannot_serve_are_refused_in_one_line(built, opened, tmp_path):
    with error_line(r"32.*128.*16.*128.*'gigamask masks --mask-size 16"):
        built.check(SampleConfig(image_size=SIDE, mask_size=16))
    for augment in (LargeScaleJitter(), ScaleJitter(1.1, 1.2)):
        with error_line(rf"{type(augment).__name__}.*--lo"):
            built.check(SampleConfig(image_size=SIDE, mask_size=GRID, augment=augment))
        with error_line(rf"a.tar:sa_0: {type(augment).__name__}.*--lo"):
            stored(built, 0, SampleConfig(image_size=SIDE, mask_size=GRID, augment=augment))
    plain = mask_store.build(opened, tmp_path / "plain", GRID, SIDE)
    with error_line(r"plain.*--mirrored"):
        plain.check(SampleConfig(SIDE, GRID, augment=HorizontalFlip()))
    for augment in (NoAugment(), HorizontalFlip(0.0)):
        plain.check(SampleConfig(SIDE, GRID, augment=augment))
    built.check(SampleConfig(SIDE, GRID, augment=HorizontalFlip()))
    with error_line(r"--model.stretch is on; leave out --loader.mask-sto"):
        built.check(SampleConfig(SIDE, GRID, stretch=True))
    assert (
        len(
            stored(
                plain,
                opened.find("a.tar:sa_0"),
                SampleConfig(SIDE, GRID, augment=HorizontalFlip(1.0)),
            ).masks
        )
        > 0
    )
    with error_line(r"a.tar:sa_1.*'gigamask masks.*--mirrored"):
        stored(
            plain, opened.find("a.tar:sa_1"), SampleConfig(SIDE, GRID, augment=HorizontalFlip(1.0))
        )


def test_few_pieces_stay_open(opened, built, monkeypatch):
    monkeypatch.setattr(mask_store, "MAX_OPEN_SHARDS", 1)
    store = MaskStore.open(built.folder, opened)
    for row in (0, 4, 0, 4):
        store.masks(row, np.arange(2))
    assert store._arrays.cache_info().currsize == 1


def test_an_image_without_masks_gives_a_sample_without(built, opened):
    assert len(stored(built, opened.find("a.tar:sa_6")).masks) == 0


def test_the_verb_builds_and_verifies(opened, tmp_path, capsys):
    out = str(tmp_path / "store")
    report = MasksCommand(
        paths=(str(opened.folder),), out=out, mask_size=GRID, image_size=SIDE
    ).run()
    assert report == {"masks": 30, "tars": 2, "bytes": 30 * 128 + 2 * (128 + 8), "mask_size": GRID}
    printed = capsys.readouterr().out
    assert f"{out}: 30 masks of 2 tars, " in printed
    assert f"--loader.mask-store {out}" in printed
    MasksCommand(paths=(str(opened.folder),), out=out, verify=True).run()
    assert "no errors" in capsys.readouterr().out
