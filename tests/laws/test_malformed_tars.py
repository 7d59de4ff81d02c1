"""Archives of strangers: each malformed or unusual one ends in samples that are equal to the valid
ones, or in one line; no command hangs, shows a traceback, or writes outside its folder.
"""

import gzip
import io
import os
import signal
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gigamask.data import index as indexes
from gigamask.data.dataset import Sa1bDataset
from gigamask.errors import CorruptSampleError
from tests import broken
from tests.commands import exit_code

MOST_S = 60
Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data)
    return info, data


def pair(number: int, stem: str | None = None) -> list[Entry]:
    """The jpg and json of a valid sample, under names that begin with `stem`."""
    return [
        entry(f"{stem}{Path(name).suffix}" if stem else name, data)
        for name, data in broken.samples(number)
    ]


def archive(*entries: Entry, layout: int = tarfile.GNU_FORMAT, **options: object) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=layout, **options) as out:
        for info, data in entries:
            out.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def named(stem: str) -> bytes:
    """An archive of two samples, of which the first has another name."""
    return archive(*pair(0, stem), *pair(1))


def with_field(at: int, value: bytes, seal: bool = True, member: int = 0) -> bytes:
    """A valid archive with one field of one header overwritten, and its checksum made right."""
    raw = bytearray(archive(*pair(0), *pair(1)))
    start = broken._starts(bytes(raw))[member]
    raw[start + at : start + at + len(value)] = value
    if seal:
        header = raw[start : start + 512]
        header[148:156] = b" " * 8
        raw[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return bytes(raw)


def pax(records: dict[str, str]) -> bytes:
    first, *others = [*pair(0), *pair(1)]
    first[0].pax_headers = records
    return archive(first, *others, layout=tarfile.PAX_FORMAT)


def raw_pax(payload: bytes) -> bytes:
    """A header of extended records with any content, before a valid sample."""
    return archive(entry("x", payload, tarfile.XHDTYPE), *pair(0), layout=tarfile.USTAR_FORMAT)


def bad_name(name: bytes) -> bytes:
    return with_field(0, name + b"\0")


KINDS: dict[str, Callable[[], bytes]] = {
    "two zero blocks": lambda: bytes(1024),
    "one zero block": lambda: bytes(512),
    "one byte": lambda: b"x",
    "text": lambda: b"hello\n" * 500,
    "no member but folders": lambda: archive(entry("a/", kind=tarfile.DIRTYPE)),
    "gzip": lambda: gzip.compress(archive(*pair(0))),
    "two archives": lambda: archive(*pair(0)) + archive(*pair(1)),
    "garbage after the end": lambda: archive(*pair(0)) + b"x" * 512,
    "cut by a byte": lambda: archive(*pair(0)).rstrip(b"\0")[:-1],
    "cut in the first header": lambda: archive(*pair(0))[:300],
    "cut after the first header": lambda: archive(*pair(0))[:512],
    "cut at half": lambda: (raw := archive(*pair(0), *pair(1)))[: len(raw) // 2],
    "size negative": lambda: with_field(124, b"\xff" * 12),
    "size of exabytes": lambda: with_field(124, b"\x80" + b"\x7f" * 11),
    "size beyond the file": lambda: with_field(124, b"77777777777\0"),
    "size in letters": lambda: with_field(124, b"abcdefghijk\0"),
    "size empty": lambda: with_field(124, b" " * 12),
    "size of zero": lambda: with_field(124, b"00000000000\0"),
    "size off by one": lambda: with_field(124, b"%011o\0" % (len(broken.sound(0)[0]) - 1)),
    "size with a sign": lambda: with_field(124, b"-0000000010\0"),
    "checksum wrong": lambda: with_field(0, b"sb", seal=False),
    "checksum in letters": lambda: with_field(148, b"zzzzzzzz", seal=False),
    "checksum empty": lambda: with_field(148, b"\0" * 8, seal=False),
    "magic missing": lambda: with_field(257, b"\0" * 8),
    "magic of others": lambda: with_field(257, b"zip  \x0000"),
    "kind unknown": lambda: with_field(156, b"Z"),
    "kind hard link": lambda: with_field(156, b"1"),
    "kind with the high bit": lambda: with_field(156, b"\xff"),
    "mode and owner in letters": lambda: with_field(100, b"x" * 24),
    "name empty": lambda: bad_name(b""),
    "name absolute": lambda: named("/etc/sa_0"),
    "name with parents": lambda: named("../../../sa_0"),
    "name with dots inside": lambda: named("a/../../sa_0"),
    "name not UTF-8": lambda: bad_name(b"sa_\xff\xfe.jpg"),
    "name with a line break": lambda: named("sa\n_0"),
    "name with an escape sequence": lambda: named("\x1b[31msa_0"),
    "name with zeros": lambda: with_field(0, b"a\0b.jpg"),
    "name of 300 bytes": lambda: named("n" * 300),
    "name of a megabyte": lambda: named("n" * 2**20),
    "name in folders": lambda: named("./a/b/sa_0"),
    "prefix full": lambda: with_field(345, b"p" * 155),
    "long name twice": lambda: archive(
        entry("././@LongLink", b"a" * 200 + b"\0", tarfile.GNUTYPE_LONGNAME),
        entry("././@LongLink", b"b" * 200 + b"\0", tarfile.GNUTYPE_LONGNAME),
        *pair(0),
    ),
    "long name at the end": lambda: archive(
        *pair(0), entry("././@LongLink", b"a" * 200, tarfile.GNUTYPE_LONGNAME)
    ),
    "symbolic links": lambda: archive(
        entry("sa_9.jpg", kind=tarfile.SYMTYPE, link="/etc/passwd"), *pair(0)
    ),
    "hard links": lambda: archive(
        *pair(0), entry("sa_9.jpg", kind=tarfile.LNKTYPE, link="sa_0.jpg")
    ),
    "devices and pipes": lambda: archive(
        entry("sa_9.jpg", kind=tarfile.CHRTYPE),
        entry("sa_9.json", kind=tarfile.FIFOTYPE),
        *pair(0),
    ),
    "sparse": lambda: archive(entry("sa_9.jpg", b"x" * 600, tarfile.GNUTYPE_SPARSE), *pair(0)),
    "volume label": lambda: archive(entry("label", kind=b"V"), *pair(0)),
    "continued from another volume": lambda: archive(entry("sa_9.jpg", b"x", b"M"), *pair(0)),
    "names twice": lambda: archive(*pair(0), *pair(0), *pair(1)),
    "names that differ in their case": lambda: archive(*pair(0), *pair(0, "SA_0"), *pair(1)),
    "only jpgs": lambda: archive(pair(0)[0], pair(1)[0]),
    "only jsons": lambda: archive(pair(0)[1], pair(1)[1]),
    "jpg and json swapped": lambda: archive(
        entry("sa_0.jpg", pair(0)[1][1]), entry("sa_0.json", pair(0)[0][1]), *pair(1)
    ),
    "members of zero bytes": lambda: archive(entry("sa_0.jpg"), entry("sa_0.json"), *pair(1)),
    "records with a size": lambda: pax({"size": "5"}),
    "records with a huge size": lambda: pax({"size": "9" * 30}),
    "records with a size in letters": lambda: pax({"size": "many"}),
    "records with a path outside": lambda: pax({"path": "../../out.jpg"}),
    "records of sparse files": lambda: pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
    "records in letters": lambda: raw_pax(b"not records at all"),
    "records whose length is too long": lambda: raw_pax(b"999 path=a\n"),
    "records whose length is zero": lambda: raw_pax(b"0 path=a\n"),
    "records whose length is negative": lambda: raw_pax(b"-5 path=a\n"),
    "records not UTF-8": lambda: raw_pax(b"12 path=\xff\xfe\n"),
    "records of a megabyte": lambda: raw_pax(b"%d path=%s\n" % (2**20 + 15, b"a" * 2**20)),
}


@contextmanager
def at_most(seconds: int):
    """Raise in whatever runs longer, such as a scan that does not end."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it ran for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
def test_an_archive_is_read_or_refused_with_one_line(kind, tmp_path, capsys, recwarn):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    path = folder / "a.tar"
    path.write_bytes(KINDS[kind]())
    with at_most(MOST_S):
        for words in (
            f"index {path} --out {out}",
            f"index {path} --out {tmp_path}/salvaged --salvage",
            f"verify {path}",
        ):
            code = exit_code(words)
            printed = capsys.readouterr()
            lines = printed.err.splitlines()
            assert code in (0, 2)
            if code:
                assert sum(line.startswith("gigamask: ") for line in lines) == 1, lines
            assert "Traceback" not in printed.err
            assert "\x1b" not in printed.out + printed.err
        for built in (out, tmp_path / "salvaged"):
            if built.is_dir():
                check_samples(built)
    assert {"in"} <= {*os.listdir(tmp_path)} <= {"in", "out", "salvaged"}
    assert os.listdir(folder) == ["a.tar"]


def check_samples(built: Path) -> None:
    """Each sample of an index is one of the valid ones, or raises the error of a bad sample."""
    valid = {jpg for jpg, _ in broken.scenes()}
    index = indexes.Index.open(built)
    dataset = Sa1bDataset(index)
    for row in range(len(index)):
        try:
            raw = dataset.read(row)
            pixels, entry = raw.pixels(), raw.annotation() if raw.json is not None else None
        except CorruptSampleError:
            continue
        assert raw.jpg in valid or raw.jpg + b"\xd9" in valid  # it lacks a part of its end marker
        assert np.isfinite(pixels).all()
        assert entry is None or entry.masks.size == pixels.shape[:2]
