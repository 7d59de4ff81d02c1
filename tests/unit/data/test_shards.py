"""Bytes by offset, from any process, and what happens when they are not there."""

import errno
import multiprocessing
import os
import pickle

import pytest

from gigamask.data import shards as reading
from gigamask.data import storage, tar
from gigamask.data.index import build
from gigamask.data.shards import ShardReader
from gigamask.errors import CorruptSampleError
from tests.errors import corrupt_sample, error_line
from tests.servers import FileServer


@pytest.fixture
def files(tmp_path):
    paths = [str(tmp_path / f"{letter}.bin") for letter in "abcde"]
    for path in paths:
        with open(path, "wb") as file:
            file.write(path[-5].encode() * 100)
    return paths


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def read_all(shards: ShardReader) -> bytes:
    return b"".join(shards.read(shard, 0, 1) for shard in range(len(shards.paths)))


def test_reads_hold_few_files_open(files):
    before = open_descriptors()
    shards = ShardReader(files, open_files=2)
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
    shards = ShardReader(files, open_files=2)
    for shard in (0, 1, 0, 2):
        shards.read(shard, 0, 1)
    for path in files:
        os.unlink(path)
    assert (shards.read(0, 0, 1), shards.read(2, 0, 1)) == (b"a", b"c")
    with corrupt_sample(r"b.bin.*1.*0.*No such file or directory"):
        shards.read(1, 0, 1)


def test_a_forked_worker_reads_with_a_reader_that_is_in_use(files):
    shards = ShardReader(files, open_files=2)
    assert read_all(shards) == b"abcde"
    results = multiprocessing.get_context("fork").SimpleQueue()
    worker = multiprocessing.get_context("fork").Process(
        target=lambda: results.put(read_all(shards))
    )
    worker.start()
    assert read_all(shards) == b"abcde"
    assert results.get() == b"abcde"
    worker.join()
    assert worker.exitcode == 0
    assert read_all(shards) == b"abcde"


def test_a_pickled_reader_opens_its_files_anew(files):
    shards = ShardReader(files, open_files=3)
    read_all(shards)
    before = open_descriptors()
    copy = pickle.loads(pickle.dumps(shards))
    assert open_descriptors() == before
    assert (read_all(copy), copy.open_files) == (b"abcde", 3)


def test_short_reads_are_named(files):
    with corrupt_sample(r"c.bin.*20.*90.*10"):
        ShardReader(files).read(2, 90, 20)


def test_a_file_whose_handle_is_stale_is_opened_again(files, monkeypatch):
    shards, read, errors = ShardReader(files), storage.pread, [errno.ESTALE]

    def pread(*given):
        if errors:
            raise OSError(errors.pop(), "stale")
        return read(*given)

    monkeypatch.setattr(storage, "pread", pread)
    assert read_all(shards) == b"abcde"
    assert not errors


def test_an_entry_is_its_jpg_and_json_wherever_they_lie(tmp_path, entry, monkeypatch):
    one, two, three = entry(1), entry(2), entry(3)
    members = [one[0], ("filler", bytes(70_000)), one[1], two[1], two[0], three[0]]
    tar.write(tmp_path / "a.tar", members)
    index = build(tmp_path / "a.tar", tmp_path / "index")
    shards, reads = ShardReader(index.shard_paths), []
    monkeypatch.setattr(
        ShardReader,
        "read",
        lambda self, *place, read=ShardReader.read: reads.append(place) or read(self, *place),
    )
    assert shards.read_entry(index, 0) == (one[0][1], one[1][1])
    assert len(reads) == 2
    assert shards.read_entry(index, 1) == (two[0][1], two[1][1])
    assert len(reads) == 3
    assert shards.read_entry(index, 2) == (three[0][1], None)
    assert len(reads) == 4


@pytest.fixture
def served(tmp_path, entry, monkeypatch):
    """A server of two tars, a local index of them, and one by their addresses."""
    folder = tmp_path / "tars"
    for letter, first in (("a", 0), ("b", 10)):
        odd = [
            *entry(first + 6),
            ("filler", bytes(70_000)),
            entry(first + 7)[0],
            ("far", bytes(70_000)),
            entry(first + 7)[1],
            entry(first + 8)[0],
        ]
        tar.write(
            folder / f"{letter}.tar",
            [member for number in range(6) for member in entry(first + number)] + odd,
        )
    with FileServer(folder) as server:
        here, there = build(folder, tmp_path / "here"), build(server.url, tmp_path / "there")
        server.forget()
        yield server, here, there


ROWS = [13, 0, 17, 8, 7, 1, 2, 9, 0, 5, 16, 12]


@pytest.mark.slow
def test_a_micro_batch_is_fetched_at_once_and_neighbours_together(served):
    server, here, there = served
    local = ShardReader(here.shard_paths).read_entries(here, ROWS)
    assert local == [ShardReader(here.shard_paths).read_entry(here, row) for row in ROWS]
    assert local[2][1] is None
    assert ShardReader(there.shard_paths).read_entries(there, ROWS) == local
    # a: 0 1 2 5 | jpg 7 | json 7, jpg 8; b: 9 12 13 | jpg 16 | json 16, jpg 17
    assert server.requests == 6
    server.delay_s = 0.05
    server.forget()
    ShardReader(there.shard_paths).read_entries(there, ROWS)
    assert (
        3 < server.most_at_once <= 7
    )  # six at once, where the machine is not busy; one that is told late counts beside them
    server.forget()
    assert ShardReader(there.shard_paths).read_entry(there, 3) == ShardReader(
        here.shard_paths
    ).read_entry(here, 3)
    assert server.requests == 1
    assert (
        ShardReader(there.shard_paths).read(0, 512, 2)
        == ShardReader(here.shard_paths).read(0, 512, 2)
        == b"\xff\xd8"
    )


@pytest.mark.slow
def test_joined_requests_have_a_bound(served, monkeypatch):
    server, here, there = served
    entry_bytes = sum(int(here.images[name][0]) for name in ("jpg_bytes", "json_bytes"))
    monkeypatch.setattr(reading, "MAX_JOINED_BYTES", 3 * (entry_bytes + 2048))
    assert ShardReader(there.shard_paths).read_entries(there, range(6)) == ShardReader(
        here.shard_paths
    ).read_entries(here, range(6))
    assert server.requests == 2


@pytest.mark.slow
def test_one_broken_stretch_leaves_its_neighbours(served):
    _, here, there = served
    expected = ShardReader(here.shard_paths).read_entries(here, [0, 3, 5])
    end = int(here.images["jpg_offset"][5])
    os.truncate(here.shard_paths[0], end + 10)
    for index in (here, there):
        found = ShardReader(index.shard_paths).read_entries(index, [0, 3, 5, 6, 9])
        assert found[:2] == expected[:2]
        assert [isinstance(each, CorruptSampleError) for each in found] == [
            False,
            False,
            True,
            True,
            False,
        ]
        assert "a.tar: " in str(found[2])
        with corrupt_sample(r"a.tar: .* \d+"):
            ShardReader(index.shard_paths).read_entry(index, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ahead, blocks", [(512, 1), (4096, 3), (10_000, 2), (2**20, 1), (100_000, 2)]
)
def test_blocks_read_ahead_are_few_and_the_bytes_the_same(served, ahead, blocks, monkeypatch):
    _, here, there = served
    shards = ShardReader(there.shard_paths, read_ahead=ahead, blocks=blocks)
    plain = ShardReader(here.shard_paths)
    most, fetched = [0], storage.read_ranges

    def fetch(places):
        at_once = (
            sum(place.size for place in places)
            if any(place.size == ahead for place in places)
            else 0
        )
        most.append(sum(map(len, shards._block_cache.values())) + at_once)
        return fetched(places)

    monkeypatch.setattr(storage, "read_ranges", fetch)
    for group in ([0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10, 11], ROWS, range(18)):
        assert shards.read_entries(there, group) == plain.read_entries(here, group)
        most.append(sum(map(len, shards._block_cache.values())))
    assert max(most) <= blocks * ahead


@pytest.mark.slow
def test_a_sequential_order_uses_few_large_requests(served):
    server, here, there = served
    shards = ShardReader(there.shard_paths, read_ahead=2**20)
    assert [shards.read_entry(there, row) for row in range(18)] == ShardReader(
        here.shard_paths
    ).read_entries(here, range(18))
    assert server.requests == 2
    shards.close()
    shards.read_entry(there, 0)
    assert server.requests == 3
    assert pickle.loads(pickle.dumps(shards)).read_ahead == 2**20
    assert pickle.loads(pickle.dumps(ShardReader(["a"], blocks=7))).blocks == 7


@pytest.mark.slow
def test_a_failed_block_is_no_reason_to_lose_what_is_there(served):
    _, here, there = served
    expected = ShardReader(here.shard_paths).read_entries(here, [0, 3])
    os.truncate(here.shard_paths[0], int(here.images["jpg_offset"][5]))
    shards = ShardReader(there.shard_paths, read_ahead=2**20)
    assert shards.read_entries(there, [0, 3]) == expected
    assert isinstance(shards.read_entries(there, [5])[0], CorruptSampleError)


@pytest.mark.slow
def test_local_files_are_not_read_ahead(served, monkeypatch):
    _, here, _ = served
    shards = ShardReader(here.shard_paths, read_ahead=2**20)
    shards.read_entries(here, ROWS)
    assert not shards._block_cache


def test_a_reader_lets_go_of_tars_where_no_more_files_may_be_open(files, monkeypatch):
    """And says so, instead of taking a tar for broken, where it has none to let go of."""
    held, open_file, close = [], os.open, os.close

    def limited(*arguments):
        if len(held) >= most:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        held.append(open_file(*arguments))
        return held[-1]

    def release(descriptor):
        held.remove(descriptor)
        close(descriptor)

    monkeypatch.setattr(reading.storage.os, "open", limited)
    monkeypatch.setattr(reading.os, "close", release)
    for most in (3, 1):
        shards = ShardReader(files)
        assert read_all(shards) == b"abcde"
        assert shards.open_files < most
        shards.close()
    most = 0
    with error_line("ulimit -n") as caught:
        ShardReader(files).read(0, 0, 1)
    assert not isinstance(caught.value, CorruptSampleError)
    monkeypatch.undo()
