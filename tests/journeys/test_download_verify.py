"""From a list of links to data that was read in full, and training over data of which some is
broken.
"""

import functools
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from gigamask.cli.main import main
from gigamask.data import tar
from gigamask.datatools.partial_download import STATE_FOLDER
from gigamask.synthetic import scenes
from tests import broken
from tests.servers import FileServer

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
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
        command = [
            "download",
            links(server, tmp_path),
            "--out",
            str(out),
            "--checksums",
            str(served / "sums.md5"),
        ]
        command += ["--json", str(tmp_path / "d.json")]
        assert main([*command, "--count", "1"]) == 0
        assert [path.name for path in sorted(out.glob("*.tar"))] == ["sa_000000.tar"]
        assert main([*command, "--names", "*_00000[02].tar"]) == 0
        assert "skipped" in capsys.readouterr().out
        assert main(command) == 0
    said = capsys.readouterr().out
    assert re.search(r"fetched +1 ", said)
    assert re.search(r"skipped +2 ", said)
    assert f"gigamask verify {out}" in said
    report = json.loads((tmp_path / "d.json").read_text())
    assert (report["fetched"], report["skipped"], report["without_checksum"]) == (1, 2, 0)
    assert [file["status"] for file in report["files"]] == ["skipped", "fetched", "skipped"]
    assert (
        main((f"verify {out} --checksums {served}/sums.md5 --json {tmp_path}/v.json").split()) == 0
    )
    assert "3 tars: 6 images" in capsys.readouterr().out
    found = json.loads((tmp_path / "v.json").read_text())
    assert (found["images"], found["bad_members"], found["bad_samples"], len(found["tars"])) == (
        6,
        [],
        0,
        3,
    )
    assert main(f"index {out} --out {tmp_path}/index".split()) == 0
    assert main(["verify", str(tmp_path / "index")]) == 0
    assert "no errors" in capsys.readouterr().out


def test_what_cannot_be_fetched_is_said_and_ends_with_2(served, tmp_path, capsys):
    with FileServer(served, status=403) as server:
        list_of_links = links(server, tmp_path)
        assert (
            main(
                [
                    "download",
                    list_of_links,
                    "--out",
                    str(tmp_path / "a"),
                    "--json",
                    str(tmp_path / "d.json"),
                ]
            )
            == 2
        )
        said = capsys.readouterr()
        assert "sa_000000.tar, sa_000001.tar, sa_000002.tar: HTTP 403 Forbidden" in said.out
        assert "3 of 3 files" in said.err
        assert json.loads((tmp_path / "d.json").read_text())["failed"] == 3
        assert (
            main(
                [
                    "download",
                    list_of_links,
                    "--out",
                    str(tmp_path / "a"),
                    "--names",
                    "sa_000009.tar",
                ]
            )
            == 2
        )
        assert "--names sa_000009.tar" in capsys.readouterr().err
        server.status = None
        assert main(["download", list_of_links, "--out", str(tmp_path / "a")]) == 0
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
    assert main(command[1:]) == 0
    assert (out / "sa_000000.tar").read_bytes() == content
    assert server.bytes_sent == len(content) - held
    assert [asked.range for asked in server.asked] == [f"bytes={held}-"]


def test_interrupted_it_ends_at_once_and_keeps_the_part(slow, tmp_path):
    server, command, content = slow
    out = tmp_path / "out"
    process = begun(command, out / STATE_FOLDER / "sa_000000.tar.part", 300_000)
    assert main(command[1:]) == 2  # a second download into the folder
    server.piece_s = 300.0  # not a byte for a long time
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert said.strip().endswith(b"gigamask: stopped by SIGINT; run the same command again")
    assert not (out / "sa_000000.tar").exists()
    assert content.startswith((out / STATE_FOLDER / "sa_000000.tar.part").read_bytes())
    server.piece_s = 0.0
    assert main(command[1:]) == 0
    assert (out / "sa_000000.tar").read_bytes() == content


def test_verify_ends_with_2_and_names_what_is_bad(tmp_path, capsys):
    bad = broken.write_samples(tmp_path / "samples.tar")
    tars = broken.write_tars(tmp_path)
    assert main(f"verify {tmp_path} --json {tmp_path}/bad.json".split()) == 2
    said = capsys.readouterr()
    assert f"{len(bad)} of " in said.err
    assert f"{len(tars)} of {len(tars) + 2} tars" in said.err
    assert "zero block" in said.out
    assert re.search(
        r"and \d+ more, all of them with --json FILE|bad .*samples.tar sa_1.jpg at \d+: ", said.out
    )
    found = json.loads((tmp_path / "bad.json").read_text())
    assert {each["sample"] for each in found["bad_members"]} == bad.keys()
    assert {"tar", "member", "offset", "sample", "reason"} == found["bad_members"][0].keys()
    assert sum(bool(each["tar_errors"]) for each in found["tars"]) == len(tars)
    assert main(["verify", str(tmp_path / "whole.tar"), "--no-decode"]) == 0


def test_checksums_of_an_index_name_a_flipped_bit(tmp_path, capsys):
    path, out = tmp_path / "a.tar", str(tmp_path / "index")
    broken.write_plain(path, broken.members(0, *broken.sound(0)))
    assert main(["index", str(path), "--out", out]) == 0
    assert main(["verify", out]) == 0
    assert re.search("1 JPEG without a checksum.*index .*--checksums", capsys.readouterr().out)
    assert main(["index", str(path), "--out", out, "--checksums"]) == 0
    assert "(1 scanned, 0 reused)" in capsys.readouterr().out
    assert main(["verify", out]) == 0
    assert "without a checksum" not in capsys.readouterr().out
    broken.flip(path, 8 * (tar.scan(path).offsets[0] + len(broken.sound(0)[0]) // 2))
    assert main(["verify", out]) == 2
    assert f"bad {path} sa_0.jpg at 512: " in capsys.readouterr().out


def train(folder: Path, out: Path, *words: str) -> tuple[int, list[dict]]:
    code = main([*f"train {LITTLE} --data {folder} --out {out}".split(), *words])
    return code, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_training_leaves_out_what_is_bad_and_says_it_once(tmp_path, capsys):
    """Two broken JPEGs, which no index can know of, and a broken json among 12 samples, seen twice
    each."""
    held = []
    for number in range(12):
        jpg, record = broken.sound(number)
        held += broken.members(
            number,
            broken.interrupt(jpg) if number == 5 else jpg[:-300] if number == 7 else jpg,
            b"{" if number == 9 else record,
        )
    (tmp_path / "data").mkdir()
    tar.write(tmp_path / "data" / "sa_000000.tar", held)
    code, notes = train(tmp_path / "data", tmp_path / "run", "--steps", "8")
    assert code == 0
    skipped = [note for note in notes if "skipped_sample" in note]
    assert {note["skipped_sample"] for note in skipped} == {
        "sa_000000.tar:sa_5",
        "sa_000000.tar:sa_7",
    }
    assert len(skipped) == 2
    assert all("the JPEG of" in note["reason"] for note in skipped)
    said = capsys.readouterr()
    assert (said.out + said.err).count("skipped sample: sa_000000.tar:sa_5: the JPEG of ") == 1
    code, _ = train(
        tmp_path / "data", tmp_path / "strict", "--steps", "8", "--max-bad-fraction", "0.0"
    )
    assert code == 2
    assert re.search(
        r"[12] of \d+ samples .* more than 0.0%; .*--max-bad-fraction",
        capsys.readouterr().err,
    )
