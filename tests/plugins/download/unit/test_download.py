"""Downloads from a real server that misbehaves in every way servers do."""

import fcntl
import gzip
import hashlib
import re
import shutil
import socket
import tarfile
import threading
import time
import tracemalloc
from collections import namedtuple
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from gigamask.plugins.download import download as downloads
from gigamask.plugins.download.links import Link
from gigamask.plugins.download.partial_download import STATE_FOLDER, DownloadState
from tests.errors import error_line
from tests.servers import FileServer

SIZES = {"a.tar": 700_000, "b.tar": 300_001, "c.tar": 512}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """A folder of three files that begin as tars do, one of them with a header alone."""
    folder = tmp_path_factory.mktemp("served")
    for name, size in SIZES.items():
        tail = hashlib.shake_128(name.encode()).digest(size - 512)
        (folder / name).write_bytes(tar_header() + tail)
    return folder


def tar_header() -> bytes:
    return tarfile.TarInfo("sa_1.jpg").tobuf(tarfile.USTAR_FORMAT)


def fetch(server: FileServer, out: Path, *names: str, **options):
    """Downloads and returns each file's outcome, or the one file's."""
    chosen = [Link(name, f"{server.url}/{name}?oe=00000001&secret=1") for name in names]
    outcomes = downloads.download(chosen, out, **{"pause_s": 0.001, **options})
    assert [outcome.name for outcome in outcomes] == list(names)
    return outcomes[0] if len(names) == 1 else outcomes


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def same(one: Path, other: Path, *names: str) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def arrives(served: Path, out: Path, status: str = "fetched", **behaviour) -> FileServer:
    """Downloads a file from a server that behaves so, which is returned."""
    with FileServer(served, **behaviour) as server:
        assert fetch(server, out, "a.tar").status == status
    assert same(served, out, "a.tar")
    return server


def begin(out: Path, name: str, part: bytes, receipt: DownloadState) -> None:
    """Leaves a part as an interrupted download does."""
    (out / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
    (out / STATE_FOLDER / f"{name}.part").write_bytes(part)
    (out / STATE_FOLDER / f"{name}.json").write_bytes(msgspec.json.encode(receipt))


def test_files_arrive_whole_and_are_not_fetched_twice(served, tmp_path):
    told = []
    with FileServer(served, delay_s=0.02) as server:
        outcomes = fetch(
            server, tmp_path, *SIZES, workers=3, progress=lambda *numbers: told.append(numbers)
        )
        assert [
            (outcome.status, outcome.bytes, outcome.received_bytes) for outcome in outcomes
        ] == [("fetched", n, n) for n in SIZES.values()]
        assert same(served, tmp_path, *SIZES)
        assert server.most_at_once > 1
        assert told[0] == (0, 0, 0)
        assert all(
            before[0] <= after[0] <= after[1]
            for before, after in pairwise(told)
            if before[1] == after[1]
        )
        server.forget()
        assert {outcome.status for outcome in fetch(server, tmp_path, *SIZES)} == {"skipped"}
        assert server.requests == 0
    assert sorted(path.name for path in (tmp_path / STATE_FOLDER).iterdir()) == [
        "a.tar.json",
        "b.tar.json",
        "c.tar.json",
        "lock",
    ]


def test_a_dropped_connection_goes_on_where_it_broke(served, tmp_path):
    server = arrives(served, tmp_path, drop_after=200_000)
    places = ["bytes=200000-", "bytes=400000-", "bytes=600000-"]
    assert [asked.range for asked in server.asked] == ["bytes=0-0", None, *places]
    assert server.bytes_sent == 700_000 + 1


def test_partially_sent_range_is_requested_again(served, tmp_path):
    server = arrives(served, tmp_path, drop_after=200_000, drops=1, most=300_000)
    assert [asked.range for asked in server.asked[2:]] == ["bytes=200000-", "bytes=500000-"]


def test_a_server_that_ignores_ranges_starts_over(served, tmp_path):
    server = arrives(served, tmp_path, ranges=False, drop_after=250_000, drops=3)
    assert server.asked[-1].range == "bytes=250000-"


def test_a_part_is_resumed(served, tmp_path):
    whole = (served / "a.tar").read_bytes()
    with FileServer(served) as server:
        begin(tmp_path, "a.tar", whole[:400_000], DownloadState(size=len(whole)))
        outcome = fetch(server, tmp_path, "a.tar", checksums={"a.tar": md5(served / "a.tar")})
        assert (outcome.status, outcome.received_bytes) == ("resumed", 300_000)
        assert [asked.range for asked in server.asked] == ["bytes=400000-"]
    assert same(served, tmp_path, "a.tar")


def test_a_whole_part_needs_no_request(served, tmp_path):
    whole = (served / "a.tar").read_bytes()
    begin(tmp_path, "a.tar", whole, DownloadState(size=len(whole)))
    assert arrives(served, tmp_path, "resumed").requests == 0


@pytest.mark.parametrize(
    "receipt, requests",
    [
        (DownloadState(size=700_000, etag='"another"'), 1),
        (DownloadState(size=700_000, etag='W/"weak"', modified="Mon, 01 Jan 2024 00:00:00 GMT"), 1),
        (DownloadState(size=700_005), 2),
        (DownloadState(), 2),
    ],
)
def test_a_part_of_another_version_is_thrown_away(served, tmp_path, receipt, requests):
    """By the server, by means of If-Range, in one request; or here, where sizes differ or nothing
    is known of the part."""
    begin(tmp_path, "a.tar", b"x" * 400_000, receipt)
    assert arrives(served, tmp_path).requests == requests


@pytest.mark.parametrize("size", [900_000, None])
def test_a_part_longer_than_the_file_is_thrown_away(served, tmp_path, size):
    begin(tmp_path, "a.tar", b"x" * 800_000, DownloadState(size=size, modified="then"))
    arrives(served, tmp_path)


def test_a_part_of_unknown_size_may_turn_out_to_be_whole(served, tmp_path):
    held = (served / "a.tar").stat()
    begin(
        tmp_path,
        "a.tar",
        (served / "a.tar").read_bytes(),
        DownloadState(etag=f'"{held.st_mtime_ns:x}-{held.st_size:x}"'),
    )
    assert arrives(served, tmp_path, "resumed").bytes_sent == 1


def test_another_range_than_requested_is_never_appended(served, tmp_path):
    with FileServer(served, shift=1, drop_after=250_000) as server:
        outcome = fetch(server, tmp_path, "a.tar")
    assert outcome.status == "failed"
    assert "another version" in outcome.reason
    assert "2 times" in outcome.reason
    assert not (tmp_path / "a.tar").exists()


def test_busy_server_is_retried(served, tmp_path):
    arrives(served, tmp_path, busy=5)


def test_a_server_that_stays_busy_is_given_up(served, tmp_path):
    told: list[str] = []
    with FileServer(served, busy=-1) as server:
        outcome = fetch(server, tmp_path, "a.tar", warn=told.append)
        assert server.requests == 1 + downloads.ATTEMPTS
    assert told == [
        f"retrying a.tar (HTTP 503 Service Unavailable), attempt {number} of 8"
        for number in range(2, 9)
    ]
    assert re.match(r"8 attempts.*HTTP 503 Service Unavailable", outcome.reason)


@pytest.mark.parametrize(
    "status, reason",
    [
        (403, "HTTP 403 Forbidden: the link expired on 1970-01-01; fetch a new links file"),
        (404, "HTTP 404 Not Found: "),
    ],
)
def test_what_does_not_pass_is_said_at_once(served, tmp_path, status, reason):
    with FileServer(served, status=status) as server:
        good, bad = tmp_path / "good", tmp_path / "bad"
        assert fetch(server, bad, "a.tar").reason.startswith(reason)
        assert server.requests == 2
        server.status = None
        assert fetch(server, good, "a.tar").status == "fetched"


def test_an_expired_link_keeps_what_is_there(served, tmp_path):
    whole = (served / "a.tar").read_bytes()
    begin(tmp_path, "a.tar", whole[:500_000], DownloadState(size=len(whole)))
    with FileServer(served, status=403) as server:
        assert fetch(server, tmp_path, "a.tar").status == "failed"
    with FileServer(served) as server:  # another address
        assert fetch(server, tmp_path, "a.tar").received_bytes == 200_000
    assert same(served, tmp_path, "a.tar")


def test_a_refused_link_that_states_no_time_may_have_expired():
    for query in ("sig=1", "oe=FFFFFFFF"):
        assert "may have expired" in downloads._expiry(f"http://x/a.tar?{query}")


def test_a_web_page_is_no_file(served, tmp_path):
    with FileServer(served, kind="text/html; charset=utf-8") as server:
        assert "web page" in fetch(server, tmp_path, "a.tar").reason
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "br"])
def test_an_encoded_file_is_refused(served, tmp_path, encoding):
    with FileServer(served, encoding=encoding) as server:
        assert encoding in fetch(server, tmp_path, "a.tar").reason
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FOLDER]


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"", "an empty body"),
        (b"\n <!DOCTYPE html><title>Sign in</title>" + b" " * 600, "a web page"),
        (gzip.compress(bytes(9000)), "gzip-compressed data"),
        (b'{"error": "expired"}', "without a tar header"),
        (bytes(10_240), "without a tar header"),
    ],
    ids=["nothing", "page", "gzip", "json", "zeros"],
)
def test_what_is_no_tar_gets_no_final_name(tmp_path, content, problem):
    """Whatever the list of checksums says, and also if an earlier version kept it."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.tar").write_bytes(content)
    out = tmp_path / "out"
    for checksums in ({}, {"a.tar": hashlib.md5(content).hexdigest()}):
        with FileServer(tmp_path / "served") as server:
            outcome = fetch(server, out, "a.tar", checksums=checksums)
        assert (outcome.status, problem in outcome.reason) == ("failed", True)
        assert [path.name for path in out.iterdir()] == [STATE_FOLDER]
    shutil.copy(tmp_path / "served" / "a.tar", out)
    with FileServer(tmp_path / "served") as server:
        assert fetch(server, out, "a.tar").status == "failed"


@pytest.mark.parametrize("kind", [True, "relative"])
def test_redirects_are_followed(served, tmp_path, kind):
    server = arrives(served, tmp_path, redirect=kind, drop_after=400_000)
    assert server.asked[-1] == ("GET", "/moved/a.tar", "bytes=400000-")


def test_redirects_without_end_are_given_up(served, tmp_path):
    with FileServer(served, redirect="loop") as server:
        assert (
            fetch(server, tmp_path, "a.tar").reason
            == "its link redirects more than 10 times; fetch a new links file"
        )
        assert server.requests == downloads.REDIRECTS + 1


def test_wrong_content_length_is_detected(served, tmp_path):
    with FileServer(served, wrong_length=5) as server:
        outcome = fetch(server, tmp_path / "one", "a.tar")
        assert re.search("700005 bytes.*700000.*2 times", outcome.reason)
        assert not (tmp_path / "one" / "a.tar").exists()
        # A checksum says that nothing is missing.
        sums = {"a.tar": md5(served / "a.tar")}
        assert fetch(server, tmp_path / "other", "a.tar", checksums=sums).status == "fetched"
    assert same(served, tmp_path / "other", "a.tar")


def test_a_file_of_unknown_length_needs_a_checksum(served, tmp_path):
    with FileServer(served, sizes=False) as server:
        assert "--checksums" in fetch(server, tmp_path, "a.tar").reason
        server.drop_after, server.drops = 300_000, 1
        assert (
            fetch(server, tmp_path, "a.tar", checksums={"a.tar": md5(served / "a.tar")}).status
            == "fetched"
        )
    assert same(served, tmp_path, "a.tar")


def test_a_wrong_checksum_is_fetched_once_more_and_then_reported(served, tmp_path):
    wrong = "0" * 64
    with FileServer(served) as server:
        outcome = fetch(server, tmp_path, "a.tar", checksums={"a.tar": wrong})
        assert server.bytes_sent == 2 * 700_000 + 1
    found = hashlib.sha256((served / "a.tar").read_bytes()).hexdigest()
    assert re.search(f"{found}.*{wrong}.*2 times", outcome.reason)
    assert [path.name for path in tmp_path.iterdir()] == [STATE_FOLDER]
    assert not (tmp_path / STATE_FOLDER / "a.tar.part").exists()


def test_a_damaged_part_is_found_by_its_checksum_and_fetched_again(served, tmp_path):
    begin(tmp_path, "a.tar", b"x" * 400_000, DownloadState(size=700_000))
    with FileServer(served) as server:
        assert (
            fetch(server, tmp_path, "a.tar", checksums={"a.tar": md5(served / "a.tar")}).status
            == "fetched"
        )
    assert same(served, tmp_path, "a.tar")


def test_files_from_elsewhere_are_compared_and_never_overwritten(served, tmp_path):
    sums = {"a.tar": md5(served / "a.tar"), "b.tar": md5(served / "b.tar")}
    shutil.copy(served / "a.tar", tmp_path)
    (tmp_path / "b.tar").write_bytes(b"half")
    with FileServer(served) as server:
        there, other = fetch(server, tmp_path, "a.tar", "b.tar", checksums=sums)
        assert (there.status, other.status, server.requests) == ("skipped", "failed", 0)
        found = hashlib.md5(b"half").hexdigest()
        assert re.search(f"checksum {found}.*{sums['b.tar']}", other.reason)
        assert re.search("4 bytes.*300001", fetch(server, tmp_path, "b.tar").reason)
        server.sizes = False
        assert re.search("4 bytes.*no size", fetch(server, tmp_path, "b.tar").reason)
        assert (tmp_path / "b.tar").read_bytes() == b"half"
        server.sizes = True
        shutil.copy(served / "b.tar", tmp_path)
        assert fetch(server, tmp_path, "b.tar").status == "skipped"
        # A checksum that is asked for later is compared then.
        assert (
            fetch(server, tmp_path, "b.tar", checksums=sums | {"b.tar": "0" * 32}).status
            == "failed"
        )


def test_a_file_that_cannot_be_read_or_written_is_one_line(served, tmp_path):
    (tmp_path / "a.tar").mkdir()
    with FileServer(served) as server:
        one, other = fetch(server, tmp_path, "a.tar", "b.tar", checksums={"a.tar": "0" * 32})
    assert "regular file" in one.reason
    assert other.status == "fetched"


def test_too_little_disk_space_is_an_error_before_downloading(served, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda folder: usage(2**40, 2**40, 10**6))
    with FileServer(served) as server:
        begin(tmp_path, "a.tar", tar_header() + bytes(99_488), DownloadState(size=700_000))
        fetch(server, tmp_path, "a.tar", "b.tar")
        for name in ("a", "b"):
            (tmp_path / f"{name}.tar").unlink()
        with error_line(r"0\.0 GB.*0\.0 GB.*--count.*--names"):
            fetch(server, tmp_path, "a.tar", "b.tar")


def test_a_disk_that_fills_up_is_one_line(served, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    (tmp_path / STATE_FOLDER).mkdir()
    (tmp_path / STATE_FOLDER / "a.tar.part").symlink_to("/dev/full")
    with (
        FileServer(served) as server,
        error_line(r"disk"),
    ):
        fetch(server, tmp_path, "a.tar")


def test_a_second_download_into_the_folder_is_refused(served, tmp_path):
    (tmp_path / STATE_FOLDER).mkdir()
    with FileServer(served) as server, open(tmp_path / STATE_FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with error_line(r"another process"):
            fetch(server, tmp_path, "a.tar")


def test_what_cannot_be_done_is_said(served, tmp_path):
    with FileServer(served) as server:
        with error_line(r"workers.*0"):
            fetch(server, tmp_path, "a.tar", workers=0)
        (tmp_path / "file").touch()
        with error_line(r"file.*(File exists|Not a directory)"):
            fetch(server, tmp_path / "file", "a.tar")


def test_no_server_is_said_without_the_address(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}/a.tar?secret=1"
        told: list[str] = []
        outcome = downloads.download(
            [Link("a.tar", url)], tmp_path, pause_s=0.001, warn=told.append
        )[0]
    assert outcome.reason.startswith("8 attempts in a row failed, the last: NewConnectionError (")
    assert re.match(r"a.tar.*size.*\(NewConnectionError \(", told[0])
    assert told[1].startswith("retrying a.tar (NewConnectionError (")
    assert told[1].endswith(", attempt 2 of 8")
    assert "secret" not in "".join(told)
    assert "refused" in outcome.reason
    assert "secret" not in outcome.reason


def test_a_proxy_is_used(served, tmp_path):
    with FileServer(served) as proxy:
        outcome = downloads.download(
            [Link("a.tar", "http://nowhere.invalid/a.tar")], tmp_path, proxy=proxy.url
        )[0]
    assert outcome.status == "fetched"
    assert same(served, tmp_path, "a.tar")


def test_never_a_half_file_under_its_name(served, tmp_path):
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if (tmp_path / "a.tar").exists():
                seen.append((tmp_path / "a.tar").stat().st_size)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    arrives(served, tmp_path, piece_s=0.01, drop_after=150_000)
    time.sleep(0.01)
    done.set()
    watcher.join()
    assert set(seen) == {700_000}


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    (tmp_path / "served").mkdir()
    with open(tmp_path / "served" / "a.tar", "wb") as file:
        file.write(tar_header())
        file.truncate(2**26)
    with FileServer(tmp_path / "served") as server:
        tracemalloc.start()
        try:
            assert fetch(server, tmp_path / "out", "a.tar").status == "fetched"
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 8 * 2**20
