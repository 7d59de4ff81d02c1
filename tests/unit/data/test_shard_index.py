"""One tar's part: the same from a disk and from a server, and what becomes of bytes that cannot be
read.
"""

import errno
import io
import os

import numpy as np
import pytest
from PIL import Image

from gigamask.data import shard_index as parts
from gigamask.data import storage, tar
from gigamask.data.image import encode_jpeg
from gigamask.data.index_format import rows_of_shard
from gigamask.data.shard_index import COLUMNS, PART, ShardIndex, index_tar, read_summary
from gigamask.errors import GigamaskError
from tests.errors import error_line
from tests.servers import FileServer


@pytest.fixture
def scenes_tar(tmp_path, entry, jpg):
    """Five images with a json and one without, whose size stands behind a long preview; in a folder
    of its own."""
    raw = jpg(40, 50)
    comment = b"\xff\xfe" + (60_000).to_bytes(2, "big") + bytes(59_998)
    members = [member for number in range(5) for member in entry(number)]
    tar.write(
        tmp_path / "tars" / "a.tar", [*members, ("sa_9.jpg", raw[:2] + comment + comment + raw[2:])]
    )
    return tmp_path / "tars" / "a.tar"


def check_same(one: ShardIndex, other: ShardIndex) -> None:
    for mine, theirs in ((one.images, other.images), (one.masks, other.masks)):
        assert mine.keys() == theirs.keys()
        assert all(
            mine[key].dtype == theirs[key].dtype and np.array_equal(mine[key], theirs[key])
            for key in mine
        )
    assert one.left_out == other.left_out


@pytest.mark.slow
@pytest.mark.parametrize("group", [(64, 2**25), (2, 2**25), (64, 1)])
def test_a_part_is_the_same_from_a_server(scenes_tar, monkeypatch, group):
    monkeypatch.setattr(parts, "GROUP_FILES", group[0])
    monkeypatch.setattr(parts, "GROUP_BYTES", group[1])
    here = index_tar(str(scenes_tar))
    assert here.images["name"].tolist() == [b"sa_0", b"sa_1", b"sa_2", b"sa_3", b"sa_4", b"sa_9"]
    with FileServer(scenes_tar.parent) as server:
        there = index_tar(f"{server.url}/a.tar?sign=1")
    check_same(here, there)
    assert there.tar.path == f"{server.url}/a.tar?sign=1"
    assert there.tar.bytes == here.tar.bytes


@pytest.mark.slow
def test_annotations_are_requested_concurrently(scenes_tar):
    with FileServer(scenes_tar.parent, delay_s=0.02) as server:
        index_tar(f"{server.url}/a.tar")
        assert server.most_at_once > 1


@pytest.mark.parametrize("member, name", [("sa_2.json", "sa_2"), ("sa_9.jpg", "sa_9")])
def test_a_disk_error_leaves_that_image_out(scenes_tar, monkeypatch, member, name):
    """Also where a whole file is read after its preview."""
    found = tar.scan(scenes_tar)
    number = found.names.index(member)
    bad, size = int(found.offsets[number]), int(found.sizes[number])

    def pread(descriptor, count, offset, real=os.pread):
        if offset == bad and (name == "sa_2" or count == size):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    made = index_tar(str(scenes_tar))
    left = {"sa_0", "sa_1", "sa_2", "sa_3", "sa_4", "sa_9"} - {name}
    assert [each.decode() for each in made.images["name"]] == sorted(left)
    [skipped] = made.left_out.skipped
    assert skipped.name == f"a.tar:{name}"
    assert f"bytes at {bad} (Input/output error)" in skipped.reason


def test_a_servers_error_stops_rather_than_leaves_out(scenes_tar, monkeypatch):
    with FileServer(scenes_tar.parent) as server:
        read = storage.read_ranges
        monkeypatch.setattr(
            storage,
            "read_ranges",
            lambda places: (
                setattr(server, "busy", -len(places) if len(places) > 1 else 0) or read(places)
            ),
        )
        with error_line(r"a.tar.*5.*503") as fault:
            index_tar(f"{server.url}/a.tar")
        assert type(fault.value) is GigamaskError


def test_a_tar_that_goes_away_meanwhile_is_named(scenes_tar, monkeypatch):
    monkeypatch.setattr(
        tar, "scan", lambda path, salvage, real=tar.scan: (real(path, salvage), os.unlink(path))[0]
    )
    with error_line(r"a.tar.*No such file or directory"):
        index_tar(str(scenes_tar))


def test_a_part_that_is_there_is_kept(scenes_tar, tmp_path):
    made = index_tar(str(scenes_tar))
    made.save(tmp_path / "part")
    (tmp_path / "part" / "mark").touch()
    made.save(tmp_path / "part")
    assert (tmp_path / "part" / "mark").exists()
    assert read_summary(tmp_path / "part").tar == made.tar
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part", "tars"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        made.save(tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "part", "tars"]


def test_a_saved_part_holds_every_column_and_a_flipped_bit_is_found(scenes_tar, tmp_path):
    made = index_tar(str(scenes_tar))
    made.save(tmp_path / "part")
    assert sorted(path.name for path in (tmp_path / "part").iterdir()) == [COLUMNS, PART]
    kept = rows_of_shard(tmp_path / "part").columns
    for kind, columns in (("images", made.images), ("masks", made.masks)):
        for name, column in columns.items():
            found = kept.open(f"{kind}_{name}")
            assert (found.dtype, found.tolist()) == (column.dtype, column.tolist()), name
    file = tmp_path / "part" / COLUMNS
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 1
    file.write_bytes(raw)
    with error_line(rf"{COLUMNS}: bytes .* were changed \(crc32\)"):
        rows_of_shard(tmp_path / "part")


def test_images_of_other_formats_are_members_unless_there_is_a_jpg(tmp_path):
    chance = np.random.default_rng(0)
    jpg = encode_jpeg(chance.integers(0, 255, (8, 9, 3), dtype=np.uint8), 90)
    array, tiff = io.BytesIO(), io.BytesIO()
    np.save(array, chance.integers(0, 4096, (6, 7, 5), dtype=np.uint16))
    Image.fromarray(chance.integers(0, 4096, (4, 5), dtype=np.uint16)).save(tiff, "TIFF")
    files = {
        "sa_1.png": b"a label image",
        "sa_1.jpg": jpg,
        "sa_2.npy": array.getvalue(),
        "d/sa_3.TIF": tiff.getvalue(),
        "sa_4.bmp": b"",
    }
    tar.write(tmp_path / "a.tar", iter(files.items()))
    part = index_tar(str(tmp_path / "a.tar"))
    sizes = zip(part.images["height"].tolist(), part.images["width"].tolist(), strict=True)
    assert list(sizes) == [(8, 9), (6, 7), (4, 5)]
    assert part.images["name"].tolist() == [b"sa_1", b"sa_2", b"sa_3"]
    assert (part.left_out.other_files, part.left_out.skipped) == (2, [])
