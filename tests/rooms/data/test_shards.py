"""Bytes by offset, from any process, and what happens when they are not there."""

import multiprocessing
import os
import pickle

import pytest

from gigamask.data import tar
from gigamask.data.index import build
from gigamask.data.shards import Shards
from gigamask.faults import BadSample


@pytest.fixture
def files(tmp_path):
    paths = [str(tmp_path / f"{letter}.bin") for letter in "abcde"]
    for path in paths:
        with open(path, "wb") as file:
            file.write(path[-5].encode() * 100)
    return paths


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def read_all(shards: Shards) -> bytes:
    return b"".join(shards.read(shard, 0, 1) for shard in range(len(shards.paths)))


def test_reads_hold_few_files_open(files):
    before = open_descriptors()
    shards = Shards(files, open_files=2)
    for _ in range(3):
        assert read_all(shards) == b"abcde"
        assert open_descriptors() == before + 2
    assert shards.read(0, 98, 2) == b"aa"
    shards.close()
    assert open_descriptors() == before
    assert shards.read(1, 0, 3) == b"bbb"
    del shards
    assert open_descriptors() == before


def test_the_least_recently_read_file_is_let_go(files):
    shards = Shards(files, open_files=2)
    for shard in (0, 1, 0, 2):
        shards.read(shard, 0, 1)
    for path in files:
        os.unlink(path)
    assert (shards.read(0, 0, 1), shards.read(2, 0, 1)) == (b"a", b"c")
    with pytest.raises(BadSample, match=r"b.bin: 1 bytes at 0 cannot be read \(No such file or directory\); check the disk"):
        shards.read(1, 0, 1)


def test_a_forked_worker_reads_with_a_reader_that_is_in_use(files):
    shards = Shards(files, open_files=2)
    assert read_all(shards) == b"abcde"
    results = multiprocessing.get_context("fork").SimpleQueue()
    worker = multiprocessing.get_context("fork").Process(target=lambda: results.put(read_all(shards)))
    worker.start()
    assert read_all(shards) == b"abcde"
    assert results.get() == b"abcde"
    worker.join()
    assert worker.exitcode == 0
    assert read_all(shards) == b"abcde"


def test_a_pickled_reader_opens_its_files_anew(files):
    shards = Shards(files, open_files=3)
    read_all(shards)
    before = open_descriptors()
    copy = pickle.loads(pickle.dumps(shards))
    assert open_descriptors() == before
    assert (read_all(copy), copy.open_files) == (b"abcde", 3)


def test_short_reads_are_named(files):
    with pytest.raises(BadSample, match=r"c.bin: 20 bytes were wanted at 90, 10 are there; fetch the tar and index it again"):
        Shards(files).read(2, 90, 20)


def test_an_entry_is_its_jpg_and_json_wherever_they_lie(tmp_path, entry, monkeypatch):
    one, two, three = entry(1), entry(2), entry(3)
    members = [one[0], ("filler", bytes(70_000)), one[1], two[1], two[0], three[0]]
    tar.write(tmp_path / "a.tar", members)
    index = build(tmp_path / "a.tar", tmp_path / "index")
    shards, reads = Shards(index.shard_paths), []
    monkeypatch.setattr(Shards, "read", lambda self, *place, read=Shards.read: reads.append(place) or read(self, *place))
    assert shards.read_entry(index, 0) == (one[0][1], one[1][1])
    assert len(reads) == 2
    assert shards.read_entry(index, 1) == (two[0][1], two[1][1])
    assert len(reads) == 3
    assert shards.read_entry(index, 2) == (three[0][1], None)
    assert len(reads) == 4
