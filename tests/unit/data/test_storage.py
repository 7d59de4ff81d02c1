"""Bytes from real servers, well behaved and not, and what is said when they are not to be had."""

import multiprocessing
import os
import shutil
import subprocess
import sys

import fsspec
import pytest

from gigamask.data import storage
from gigamask.data.storage import ByteRange
from tests.errors import corrupt_sample, error_line
from tests.servers import FileServer, Hub, ObjectStore

DATA = bytes(range(256)) * 1200


@pytest.fixture
def served(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    (tmp_path / "b.tar").write_bytes(DATA[::-1])
    (tmp_path / "notes.txt").write_bytes(b"hello")
    return tmp_path


@pytest.fixture(scope="module")
def objects():
    with ObjectStore() as started:
        yield started


def test_what_is_a_url():
    assert all(
        map(
            storage.is_remote,
            ("s3://a/b.tar", "http://h/a.tar", "memory://x", "simplecache::s3://a/b"),
        )
    )
    assert not any(map(storage.is_remote, ("/a/b.tar", "a.tar", "odd:name.tar", "C:/a.tar")))
    assert storage.normalize("file:///a/../b.tar") == "/b.tar"
    assert storage.normalize("s3://a//b.tar") == "s3://a//b.tar"
    assert storage.strip_query("https://h/a.tar?sign=1/2#x") == "https://h/a.tar"
    assert (storage.strip_query("s3://b/a?.tar"), storage.strip_query("/a?.tar")) == (
        "s3://b/a?.tar",
        "/a?.tar",
    )


def test_paths_of_other_classes(served):
    with os.scandir(served) as entries:
        assert storage.path_list(entries) == tuple(map(str, served.iterdir()))


def test_what_is_no_path_is_named_briefly():
    with error_line(r"^\{1: 'x{55} is not a path"):
        storage.path_list([{1: "x" * 99}])


def test_local_ranges_and_states(served):
    path = str(served / "a.tar")
    assert storage.stat(path) == (len(DATA), str(os.stat(path).st_mtime_ns))
    assert storage.stat_all([path, path]) == [storage.stat(path)] * 2
    assert storage.read_ranges(
        [ByteRange(path, 5, 3), ByteRange(str(served / "b.tar"), 0, 2), ByteRange(path, 0, 0)]
    ) == [DATA[5:8], b"\xff\xfe", b""]
    for place, message in (
        (ByteRange(path, len(DATA) - 1, 3), r"a.tar: .*3 bytes at \d+, got 1"),
        (
            ByteRange(str(served / "no.tar"), 0, 3),
            r"no.tar: .*3 bytes at 0 \(No such file or directory\)",
        ),
        (ByteRange(str(served), 0, 3), r"3 bytes at 0 \(Is a directory\)"),
    ):
        with corrupt_sample(message):
            storage.read(*place)


@pytest.mark.parametrize("behaviour", [{}, {"redirect": True}, {"head": False}, {"busy": 4}])
def test_http_ranges_and_states(served, behaviour):
    with FileServer(served, **behaviour) as server:
        url = f"{server.url}/a.tar?sign=1"
        tag = f"{(served / 'a.tar').stat().st_mtime_ns:x}-{len(DATA):x}"
        assert storage.stat(url) == (len(DATA), f'"{tag}"')
        server.forget()
        assert storage.read_ranges(
            [ByteRange(url, 5, 3), ByteRange(f"{server.url}/b.tar", 256, 2), ByteRange(url, 0, 0)]
        ) == [DATA[5:8], b"\xff\xfe", b""]
        assert {asked.range for asked in server.asked} == {"bytes=5-7", "bytes=256-257"}


def test_version_is_taken_from_the_server(served):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/store/a.tar", b"1")
    first = storage.stat("memory://store/a.tar")
    memory.pipe_file("/store/a.tar", b"2")
    assert first.version != storage.stat("memory://store/a.tar").version != ""
    assert storage.read("memory://store/a.tar", 0, 1) == b"2"


def test_many_ranges_are_requested_concurrently(served):
    with FileServer(served, delay_s=0.05) as server:
        places = [ByteRange(f"{server.url}/a.tar", 10 * number, 10) for number in range(32)]
        assert storage.read_ranges(places) == [
            DATA[10 * number : 10 * number + 10] for number in range(32)
        ]
        assert (server.requests, server.most_at_once > 4) == (
            32,
            True,
        )  # all of them on a machine that is not busy
        states = storage.stat_all([f"{server.url}/{name}.tar" for name in "abab"])
        assert states[0] == states[2] != states[1] == states[3]


@pytest.mark.parametrize(
    "behaviour, requests",
    [
        ({"busy": 3}, 2 + 3),
        ({"drop_after": 3, "drops": 3}, 2 + 3),
        ({"drop_after": 3, "drops": 1}, 2 + 1),
    ],
)
def test_only_failed_ranges_are_requested_again(served, behaviour, requests):
    with FileServer(served, **behaviour) as server:
        url = f"{server.url}/a.tar"
        assert storage.read_ranges([ByteRange(url, 0, 100), ByteRange(url, 1000, 100)]) == [
            DATA[:100],
            DATA[1000:1100],
        ]
        assert server.requests == requests


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        ({"busy": -1}, r"503, message='Service Unavailable'"),
        ({"status": 429}, r"429, message='Too Many Requests'"),
        ({"drop_after": 3}, r"Not enough data"),
        ({"wrong_length": 7}, r"Not enough data"),
    ],
)
def test_trying_again_has_an_end(served, behaviour, reason):
    with FileServer(served, **behaviour) as server:
        message = rf"a.tar: .*100 bytes at 7 after 5 tries \(.*{reason}"
        with corrupt_sample(message):
            storage.read(f"{server.url}/a.tar", 7, 100)
        assert server.requests == storage.MAX_TRIES


def test_unavailable_server_is_tried_five_times():
    with error_line(r"x.tar.*5.*Cannot connect to host"):
        storage.stat("http://127.0.0.1:9/x.tar")


@pytest.mark.parametrize(
    "name, behaviour, message",
    [
        ("none.tar", {}, r"none.tar: .*3 bytes at 9 \(not found: .*\); check the URL"),
        (
            "a.tar",
            {"status": 403},
            r"a.tar: .*3 bytes at 9 \(no permission: 403.*\); .*credentials",
        ),
        ("a.tar", {"status": 400}, r"a.tar: .*3 bytes at 9 \(400, .*\); check the URL"),
        ("notes.txt", {}, r"3 bytes at 9 \(416, .*\); .*index it again"),
        ("a.tar", {"ranges": False}, "a.tar: .*ignores ranges.*'gigamask download'"),
    ],
)
def test_permanent_errors_are_not_retried(served, name, behaviour, message):
    with FileServer(served, **behaviour) as server:
        with corrupt_sample(message):
            storage.read(f"{server.url}/{name}", 9, 3)
        assert server.requests == 1


def test_a_whole_file_is_not_read_where_a_range_was_wanted(tmp_path):
    with open(tmp_path / "big.tar", "wb") as file:
        file.truncate(2**30)
    with FileServer(tmp_path, ranges=False) as server:
        with corrupt_sample("ignores ranges"):
            storage.read(f"{server.url}/big.tar", 9, 3)
        assert server.bytes_sent < 2**25


def test_response_longer_than_requested_is_rejected(monkeypatch):
    fsspec.filesystem("memory").pipe_file("/store/a.tar", b"12345")
    monkeypatch.setattr(
        fsspec.get_filesystem_class("memory"),
        "cat_ranges",
        lambda self, paths, *rest, **more: [b"12345"] * len(paths),
    )
    with corrupt_sample(r"memory://store/a.tar"):
        storage.read("memory://store/a.tar", 0, 2)


def test_a_file_without_length_is_refused(served):
    with FileServer(served, sizes=False) as server, error_line(r"a.tar"):
        storage.stat(f"{server.url}/a.tar")


@pytest.mark.parametrize(
    "protocol, module, extra",
    [
        *[("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("https", "aiohttp", "http")],
        ("hf", "huggingface_hub", "hf"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(monkeypatch, protocol, module, extra):
    for name in (f"{module}.core", "fsspec.implementations.http"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with error_line(rf"^{protocol}://h/a.tar.*gigamask\[{extra}\]"):
        storage.stat(f"{protocol}://h/a.tar")


def test_another_missing_library_and_an_unknown_protocol_are_named():
    with error_line(r"dropbox://h/a.tar.*install it"):
        storage.stat("dropbox://h/a.tar")
    with error_line(r"foo://a.tar.*Protocol not known"):
        storage.stat("foo://a.tar")


def test_a_bug_is_not_taken_for_a_server(monkeypatch):
    def broken(self, *rest, **more):
        raise TypeError("ours")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "info", broken)
    with pytest.raises(TypeError, match="ours"):
        storage.stat("memory://store/a.tar")


def test_tars_of_remote_folders_and_globs(served):
    with FileServer(served) as server:
        both = [f"{server.url}/a.tar", f"{server.url}/b.tar"]
        assert (
            storage.find_tars(server.url)
            == storage.find_tars(f"{server.url}/")
            == storage.find_tars(f"{server.url}/*.tar")
            == both
        )
        assert storage.find_tars(f"{server.url}/[b]*") == both[1:]
        server.forget()
        assert storage.find_tars(f"{server.url}/c.tar?sign=[*]") == [f"{server.url}/c.tar?sign=[*]"]
        assert server.requests == 0
        with error_line("glob"):
            storage.find_tars(f"{server.url}/z*.tar")
        (served / "empty").mkdir()
        with error_line(r"empty.*\.tar"):
            storage.find_tars(f"{server.url}/empty")
    fsspec.filesystem("memory").pipe({"/listed/a.tar": b"", "/listed/b.txt": b""})
    assert storage.find_tars("memory://listed") == ["memory://listed/a.tar"]


@pytest.mark.slow
def test_a_data_set_of_the_hub(served, tmp_path):
    deep = tmp_path / "hub/datasets/us/tars/main/deep"
    deep.mkdir(parents=True)
    for name in ("a.tar", "b.tar"):
        shutil.copy(served / name, deep)
    with Hub(tmp_path / "hub") as hub:
        both = [f"hf://datasets/us/tars/deep/{name}.tar" for name in "ab"]
        assert storage.find_tars("hf://us/tars/deep") == both
        assert storage.find_tars("hf://us/tars/**/*.tar") == both
        assert storage.find_tars("hf://datasets/us/tars@main/deep/[b]*")[0].endswith(
            "@main/deep/b.tar"
        )
        url = "hf://us/tars/deep/a.tar"
        assert storage.stat(url).bytes == len(DATA)
        assert len(storage.stat(url).version) == 40
        hub.asked.clear()
        ranges = [storage.ByteRange(url, start, 3) for start in range(20)]
        assert storage.read_ranges(ranges) == [DATA[start : start + 3] for start in range(20)]
        assert sorted({each.range for each in hub.asked}) == sorted(
            f"bytes={start}-{start + 2}" for start in range(20)
        ), "no byte more, and the folder is listed once"
        for wrong, status in (("hf://us/none/a.tar", None), (url, 403)):
            hub.status = status
            with error_line(rf"^{wrong}: .*hf auth login"):
                storage.read(wrong, 0, 3)


@pytest.mark.slow
def test_s3(objects, served):
    url = objects.put(served / "a.tar", "deep/a.tar")
    other = objects.put(served / "b.tar", "deep/b.tar")
    objects.put(served / "notes.txt", "deep/notes.txt")
    assert storage.stat(url).bytes == len(DATA)
    assert storage.stat(url).version != storage.stat(other).version
    assert storage.read_ranges([ByteRange(url, 5, 3), ByteRange(other, 0, 2)]) == [
        DATA[5:8],
        b"\xff\xfe",
    ]
    assert (
        storage.find_tars(f"{objects.url}/deep")
        == storage.find_tars(f"{objects.url}/deep/*.tar")
        == storage.find_tars(f"{objects.url}/*/?.tar")
        == [url, other]
    )
    for bad, message in (
        (f"{objects.url}/none.tar", r"not found: .*\); check the URL"),
        ("s3://no-such-bucket/a.tar", r"not found: The specified bucket does not exist"),
    ):
        with error_line(rf"{bad}.*{message}"):
            storage.stat(bad)
        with corrupt_sample(rf"{bad}: .*2 bytes at 1"):
            storage.read(bad, 1, 2)
    with error_line(r"s3://no-such-bucket"):
        storage.find_tars("s3://no-such-bucket")
    with error_line("deep"):
        storage.stat(f"{objects.url}/deep")
    with corrupt_sample(r"not satisfiable"):
        storage.read(url, 10**7, 2)


@pytest.mark.slow
def test_s3_without_credentials_and_without_server(objects, monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": objects.endpoint})
    with corrupt_sample(r"Unable to locate credentials"):
        storage.read("s3://other/a.tar", 0, 5)
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b"}
    )
    with corrupt_sample(r"Could not connect to the endpoint URL"):
        storage.read("s3://other/a.tar", 0, 5)


def read_twice(url: str, results) -> None:
    results.put([storage.read(url, 3, 4), storage.read(url, 30, 4)])


@pytest.mark.slow
def test_a_forked_process_opens_servers_anew(served):
    with FileServer(served) as server:
        url = f"{server.url}/a.tar"
        assert storage.read(url, 0, 2) == DATA[:2]
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        workers = [context.Process(target=read_twice, args=(url, results)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for _ in workers:
            assert results.get() == [DATA[3:7], DATA[30:34]]
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        assert storage.read(url, 9, 3) == DATA[9:12]


@pytest.mark.slow
def test_nothing_remote_is_imported_for_local_files(tmp_path):
    code = (
        "import sys; from pathlib import Path; from gigamask.data import storage, index, shards\n"
        "Path('a').write_bytes(b'12'); assert storage.read(storage.normalize('a'), 0, 1) == b'1'\n"
        "print([name for name in ('fsspec', 'aiohttp', 's3fs', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "fsspec" not in done.stdout
    assert "aiohttp" not in done.stdout


@pytest.mark.slow
def test_a_session_that_was_closed_is_tried_again():
    again, words = storage._classify_error(
        "s3://bucket/a.tar", RuntimeError("Session is closed"), 5
    )
    assert again
    assert words.startswith(" after 5 tries (Session is closed); check the network and the server")
    with pytest.raises(NotImplementedError):
        storage._classify_error("odd://a.tar", NotImplementedError(), 1)
