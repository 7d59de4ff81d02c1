"""From a list of links to data that was read in full."""

import functools
import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from gigamask.plugins.download.partial_download import STATE_FOLDER
from gigamask.serialization import read_json
from gigamask.synthetic import scenes
from tests.commands import exit_code, invoke, refusal
from tests.servers import FileServer

GIGAMASK = str(Path(sys.executable).parent / "gigamask")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Path:
    """A folder of three shards and their checksums."""
    folder = tmp_path_factory.mktemp("served")
    scenes.write(folder, 6, seed=3, shard_images=2, long_side=(96, 128))
    sums = [
        f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.glob("*.tar"))
    ]
    (folder / "sums.md5").write_text("".join(sums))
    return folder


def links(server: FileServer, folder: Path) -> str:
    path = folder / "links.txt"
    path.write_text(
        "file_name\tcdn_link\n"
        + "".join(f"sa_{n:06d}.tar\t{server.url}/sa_{n:06d}.tar?sig={n}\n" for n in range(3))
    )
    return str(path)


def test_links_become_verified_data(served, tmp_path, capsys):
    out = tmp_path / "data"
    with FileServer(served, drop_after=20_000) as server:
        command = f"download {links(server, tmp_path)} --out {out} --checksums {served}/sums.md5"
        command += f" --json {tmp_path}/d.json"
        invoke(command, "--count 1")
        assert [path.name for path in sorted(out.glob("*.tar"))] == ["sa_000000.tar"]
        invoke(command, "--names '*_00000[02].tar'")
        assert "skipped" in capsys.readouterr().out
        invoke(command)
    said = capsys.readouterr().out
    assert re.search(r"fetched +1 ", said)
    assert re.search(r"skipped +2 ", said)
    assert f"gigamask verify {out}" in said
    report = read_json(tmp_path / "d.json")
    assert (report["fetched"], report["skipped"], report["without_checksum"]) == (1, 2, 0)
    assert [file["status"] for file in report["files"]] == ["skipped", "fetched", "skipped"]
    invoke(f"verify {out} --checksums {served}/sums.md5")
    assert "3 tars: 6 images" in capsys.readouterr().out
    invoke(f"index {out} --out {tmp_path}/index")
    invoke(f"verify {tmp_path}/index")
    assert "no errors" in capsys.readouterr().out


def test_what_cannot_be_fetched_is_said_and_ends_with_2(served, tmp_path, capsys):
    with FileServer(served, status=403) as server:
        command = f"download {links(server, tmp_path)} --out {tmp_path}/a"
        assert exit_code(command, f"--json {tmp_path}/d.json") == 2
        said = capsys.readouterr()
        assert "sa_000000.tar, sa_000001.tar, sa_000002.tar: HTTP 403 Forbidden" in said.out
        assert "3 of 3 files" in said.err
        assert read_json(tmp_path / "d.json")["failed"] == 3
        assert "--names sa_000009.tar" in refusal(capsys, command, "--names sa_000009.tar")
        server.status = None
        invoke(command)
        assert "3 without a checksum" in capsys.readouterr().out


@pytest.fixture
def slow(tmp_path):
    """A server of one file of 2 MB that takes some seconds for it, and the command that
    fetches it."""
    (tmp_path / "served").mkdir()
    header = tarfile.TarInfo("sa_1.jpg").tobuf(tarfile.USTAR_FORMAT)
    content = header + hashlib.shake_128(b"slow").digest(2_000_000)
    (tmp_path / "served" / "sa_000000.tar").write_bytes(content)
    with FileServer(tmp_path / "served", piece_s=0.1) as server:
        (tmp_path / "links.txt").write_text(f"sa_000000.tar\t{server.url}/sa_000000.tar\n")
        command = [
            GIGAMASK,
            "download",
            str(tmp_path / "links.txt"),
            "--out",
            str(tmp_path / "out"),
        ]
        yield server, command, content


def begun(command: list[str], part: Path, held: int) -> subprocess.Popen:
    """Starts the command and returns once so many bytes have arrived."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # What a shell starts in the background ignores interrupts, and so does what it starts in turn.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, preexec_fn=heed
    )
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size >= held) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    return process


@pytest.mark.long
def test_killed_at_any_moment_it_goes_on_where_it_was(slow, tmp_path):
    server, command, content = slow
    out = tmp_path / "out"
    part = out / STATE_FOLDER / "sa_000000.tar.part"
    for kill in (400_000, 1_000_000):
        process = begun(command, part, kill)
        process.kill()
        process.communicate()
        assert not (out / "sa_000000.tar").exists()
        assert part.stat().st_size >= kill
        assert content.startswith(part.read_bytes())
    server.piece_s = 0.0
    held = part.stat().st_size
    while server.at_once:  # the answer to who was killed is still being given
        time.sleep(0.01)
    server.forget()
    invoke(*command[1:])
    assert (out / "sa_000000.tar").read_bytes() == content
    assert server.bytes_sent == len(content) - held
    assert [asked.range for asked in server.asked] == [f"bytes={held}-"]


def test_interrupted_it_ends_at_once_and_keeps_the_part(slow, tmp_path):
    server, command, content = slow
    out = tmp_path / "out"
    process = begun(command, out / STATE_FOLDER / "sa_000000.tar.part", 300_000)
    assert exit_code(*command[1:]) == 2  # a second download into the folder
    server.piece_s = 300.0  # not a byte for a long time
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert said.strip().endswith(b"gigamask: stopped by SIGINT; run the same command again")
    assert not (out / "sa_000000.tar").exists()
    assert content.startswith((out / STATE_FOLDER / "sa_000000.tar.part").read_bytes())
    server.piece_s = 0.0
    invoke(*command[1:])
    assert (out / "sa_000000.tar").read_bytes() == content
