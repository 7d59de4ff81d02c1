"""Tar headers against the standard library, and every way an archive is broken."""

import gzip
import io
import tarfile

import pytest

from gigamask.data import tar
from gigamask.errors import GigamaskError
from tests.errors import error_line
from tests.servers import FileServer

THREE = [("sa_1.jpg", bytes(range(256)) * 5), ("sa_1.json", b"{}"), ("sa_2.jpg", b"x" * 1024)]


def header(
    name: bytes,
    size: bytes,
    kind: bytes = b"0",
    prefix: bytes = b"",
    magic: bytes = b"ustar\x0000",
    signed: bool = False,
) -> bytes:
    """One header, its checksum right."""
    fields = bytearray(512)
    for at, value in (
        (0, name),
        (124, size),
        (156, kind),
        (257, magic),
        (345, prefix),
        (148, b" " * 8),
    ):
        fields[at : at + len(value)] = value
    total = sum(byte - 256 * (signed and byte > 127) for byte in fields)
    fields[148:156] = b"%06o\0 " % total
    return bytes(fields)


def pax(records: bytes, kind: bytes = b"x") -> bytes:
    return (
        header(b"PaxHeader", b"%011o\0" % len(records), kind) + records + bytes(-len(records) % 512)
    )


def put(folder, data: bytes, end: bytes = bytes(1024)):
    path = folder / "t.tar"
    path.write_bytes(data + end)
    return path


def files_of(path) -> list[tuple[str, int, int]]:
    found = tar.scan(path)
    return list(zip(found.names, found.offsets.tolist(), found.sizes.tolist(), strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 8192])
@pytest.mark.parametrize("layout", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_scan_finds_what_tarfile_finds(tmp_path, monkeypatch, layout, chunk):
    monkeypatch.setattr(tar, "_CHUNK", chunk)
    path = tmp_path / "t.tar"
    long = ["deep/" * 25 + "sa_3.jpg"] + (
        [] if layout == tarfile.USTAR_FORMAT else ["f" * 120 + ".jpg", "g" * 300 + "/é.json"]
    )
    with tarfile.open(path, "w", format=layout) as archive:
        for name in ["sa_1.jpg", "./sa_2.jpg", "folder/sa_1.json", "é.jpg", *long, "last"]:
            info = tarfile.TarInfo(name)
            info.size = 700 + len(name)
            archive.addfile(info, io.BytesIO(b"p" * info.size))
            for kind, other in (
                (tarfile.DIRTYPE, "d"),
                (tarfile.SYMTYPE, "s"),
                (tarfile.LNKTYPE, "l"),
            ):
                info = tarfile.TarInfo(name[:50] + other)
                info.type, info.linkname = (
                    kind,
                    "n" * (100 if layout == tarfile.USTAR_FORMAT else 130),
                )
                archive.addfile(info)
    with tarfile.open(path) as archive:
        expected = [
            (member.name, member.offset_data, member.size) for member in archive if member.isreg()
        ]
    assert files_of(path) == expected


def test_scan_of_real_tars(real_data):
    for path in sorted(real_data.glob("*/*.tar")):
        with tarfile.open(path) as archive:
            assert files_of(path) == [
                (member.name, member.offset_data, member.size) for member in archive
            ]


@pytest.mark.parametrize(
    "size",
    [
        b"00000000005\0",
        b"00000000005 ",
        b"000000000005",
        b"          5 ",
        b"5\0\0\0\0\0\0\0\0\0\0\0",
        b"\x80" + (5).to_bytes(11, "big"),
        b"     5 \0\0\0\0\0",
    ],
)
def test_sizes_are_read_however_they_are_written(tmp_path, size):
    data = header(b"a", size) + b"12345".ljust(512, b"\0") + header(b"b", b"00000000000\0")
    assert files_of(put(tmp_path, data)) == [("a", 512, 5), ("b", 1536, 0)]


def test_sizes_above_eight_gigabytes(tmp_path):
    for data in (
        header(b"a", b"\x80" + (2**33 + 1).to_bytes(11, "big")),
        pax(b"19 size=8589934593\n") + header(b"a", b"00000000000\0"),
    ):
        with error_line(r"member 1 \(a\).*(8589935105|8589936129)"):
            tar.scan(put(tmp_path, data))


def test_pax_records_apply_to_the_next_member_and_global_ones_to_all(tmp_path):
    data = (
        pax(b"11 path=qq\n12 mtime=17\n10 size=5\n")
        + header(b"a", b"00000000000\0")
        + bytes(512)
        + header(b"b", b"00000000000\0")
    )
    assert files_of(put(tmp_path, data)) == [("qq", 1536, 5), ("b", 2560, 0)]
    data = pax(b"10 size=5\n", b"g") + (header(b"a", b"00000000000\0") + bytes(512)) * 2
    assert files_of(put(tmp_path, data)) == [("a", 1536, 5), ("a", 2560, 5)]


def test_prefixes_old_folders_and_checksums(tmp_path):
    size = b"00000000000\0"
    data = header(b"x.jpg", size, prefix=b"deep/down") + header(
        b"y.jpg", size, prefix=b"77", magic=b"ustar  \0"
    )
    data += (
        header(b"folder/", size, b"\0", magic=b"")
        + header(b"old", size, b"\0", magic=b"")
        + header(b"\xff\xfe", size, signed=True)
    )
    data += header(b"z.jpg\0rest", size)
    assert [name for name, _, _ in files_of(put(tmp_path, data))] == [
        "deep/down/x.jpg",
        "y.jpg",
        "old",
        "\udcff\udcfe",
        "z.jpg",
    ]


def test_every_cut_of_a_tar_is_noticed(tmp_path):
    path = tmp_path / "whole.tar"
    tar.write(path, THREE)
    whole = path.read_bytes()
    starts = [0, 2048, 3072, 4608]  # three headers, the end mark
    for cut in [*range(0, len(whole), 512), 100, 600, 2048 + 200, 4608 + 511]:
        short = put(tmp_path, whole[:cut], b"")
        if cut >= starts[3] + 512:  # all members and a zero block: nothing is lost
            assert len(files_of(short)) == 3
            continue
        complete = sum(cut >= start for start in starts[1:])
        with error_line(rf"t.tar.*{cut}") as fault:
            tar.scan(short)
        if cut in starts[1:]:
            assert f"member {complete} ({THREE[complete - 1][0]})" in str(fault.value)
        elif cut == 0:
            assert "first member" in str(fault.value)
        elif starts[complete] + 512 <= cut:
            name, payload = THREE[complete]
            assert (
                f"member {complete + 1} ({name}) ends at {starts[complete] + 512 + len(payload)}"
                in str(fault.value)
                or complete == 3
            )


def test_entry_number_in_an_error_counts_across_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "_CHUNK", 2)
    data = b"".join(header(b"m%d" % number, b"00000000000\0") for number in range(4))
    with error_line(r"member 4.*m3"):
        tar.scan(put(tmp_path, data, b""))


@pytest.mark.parametrize(
    "data, message",
    [
        (gzip.compress(b"a" * 5000, mtime=0).ljust(2048, b"\1"), r"the 512 bytes at 0 .*tar.gz"),
        (b"\xff\xd8\xff" + b"jpeg" * 300, "the 512 bytes at 0 "),
        (
            header(b"a", b"00000000000\0") + b"\7" + header(b"b", b"00000000000\0")[1:],
            "the 512 bytes at 512 .*checksum.*; .*download it again",
        ),
        (header(b"a", b"zz"), r"the header at byte 0 states no size \(b'zz"),
        (header(b"a", b"-0000000001\0"), r"the header at byte 0 states no size \(b'-0"),
        (header(b"a", b"\xff" * 12), r"the header at byte 0 states no size \(b'\\xff"),
        (
            header(b"a", b"00000000000\0") + bytes(512) + header(b"b", b"00000000000\0"),
            "one zero block at byte 512 ",
        ),
        (
            header(b"a", b"00000000000\0") + bytes(2**20 + 512),
            "the archive ends at 512, .* 1050624 bytes",
        ),
        (
            header(b"a", b"00006000000\0", b"L") + bytes(0o6000000),
            "the extension at byte 0 has 1572864 bytes, at most 1048576",
        ),
        (pax(b"99 path=a\n"), "the PAX header at byte 0 is broken"),
        (pax(b"path=a\n"), "the PAX header at byte 0 is broken"),
        (pax(b"11 size=-5\n"), "the PAX header at byte 0 is broken"),
        (
            pax(b"24 GNU.sparse.major=1\n".replace(b"24", b"22")) + header(b"a", b"00000000000\0"),
            "member 1 is a sparse file",
        ),
        (header(b"a", b"00000000000\0", b"S"), "member 1 is a sparse file"),
    ],
)
def test_broken_tars_are_named(tmp_path, data, message):
    with error_line(f"t.tar: {message}"):
        tar.scan(put(tmp_path, data))


def test_unreadable_paths_are_named(tmp_path):
    with error_line(r"none.tar.*No such file or directory"):
        tar.scan(tmp_path / "none.tar")
    with error_line(r"Is a directory"):
        tar.scan(tmp_path)


def test_write_depends_on_the_members_alone_and_tarfile_reads_it(tmp_path):
    members = [*THREE, ("folder/" * 20 + "sa_3.jpg", b"")]
    for name in ("a.tar", "new/b.tar"):
        tar.write(tmp_path / name, iter(members))
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "new" / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert [
            (member.name, archive.extractfile(member).read(), member.mtime, member.uid)
            for member in archive
        ] == [(*each, 0, 0) for each in members]


def test_write_leaves_nothing_behind_when_it_fails(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"before")

    def members():
        yield THREE[0]
        raise RuntimeError("source gone")

    with pytest.raises(RuntimeError, match="source gone"):
        tar.write(tmp_path / "a.tar", members())
    with error_line(r"a.tar.*'n+'.*1"):
        tar.write(tmp_path / "a.tar", [("n" * 101, b"x")])
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    assert (tmp_path / "a.tar").read_bytes() == b"before"


@pytest.mark.parametrize("window", [512, 4096, 2**18])
def test_a_remote_scan_finds_the_same(tmp_path, monkeypatch, window):
    monkeypatch.setattr(tar, "WINDOW_BYTES", window)
    members = [(f"{'deep/' * 30}sa_{number}.jpg", bytes(1000 * number)) for number in range(12)]
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, payload in [*members, ("ü" * 80, b"last")]:
            info = tarfile.TarInfo(name)
            info.size = len(payload)
            archive.addfile(info, io.BytesIO(payload))
    with FileServer(tmp_path) as server:
        there = tar.scan(f"{server.url}/t.tar")
        here = tar.scan(tmp_path / "t.tar")
        assert (there.names, there.offsets.tolist(), there.sizes.tolist()) == (
            here.names,
            here.offsets.tolist(),
            here.sizes.tolist(),
        )
        whole = (tmp_path / "t.tar").stat().st_size
        assert server.bytes_sent <= whole + window
        (tmp_path / "t.tar").write_bytes((tmp_path / "t.tar").read_bytes()[:20_000])
        with error_line(rf"{server.url}/t.tar.*6.*20000"):
            tar.scan(f"{server.url}/t.tar")


def test_a_remote_scan_jumps_over_payloads(tmp_path):
    pairs = [
        (f"sa_{number}.{kind}", bytes(size))
        for number in range(4)
        for kind, size in (("jpg", 1_000_000), ("json", 90_000))
    ]
    tar.write(tmp_path / "t.tar", pairs)
    with FileServer(tmp_path) as server:
        assert len(tar.scan(f"{server.url}/t.tar").names) == 8
        assert server.requests == 1 + 5  # HEAD; the first header, then one window from each json on
        assert server.bytes_sent <= 5 * tar.WINDOW_BYTES


def test_a_remote_scan_that_fails_is_one_line(tmp_path, monkeypatch):
    tar.write(tmp_path / "t.tar", THREE)
    with FileServer(tmp_path, drop_after=100) as server, error_line(r"t.tar.*10240.*0.*5") as fault:
        tar.scan(f"{server.url}/t.tar")
    assert type(fault.value) is GigamaskError
    with FileServer(tmp_path, ranges=False) as server, error_line(r"ranges.*'gigamask download"):
        tar.scan(f"{server.url}/t.tar")
