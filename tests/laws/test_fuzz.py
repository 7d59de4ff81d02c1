"""Whatever bytes the readers are given, they return something valid or raise a GigamaskError;
nothing else, in bounded time and memory.
"""

import contextlib
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gigamask.data import annotation, image, tar
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.masks.rle import RLEMasks
from tests import broken
from tests.errors import corrupt_sample

ROOT = Path(__file__).resolve().parents[2]
# A reader that hangs is a failure as well; five seconds are a thousand times what an example takes.
FUZZ = settings(max_examples=300, deadline=timedelta(seconds=5))

edits = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.sampled_from(["set", "insert", "delete", "cut", "repeat"]),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=6,
)


def edit(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    """Bytes that were changed in a few places, each given as a share of the length."""
    for share, kind, new in changes:
        at = int(share * len(data))
        if kind == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(new) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + data[at : at + 64 * len(new)] * 2 + data[at:]
    return data


@cache
def archives() -> list[bytes]:
    """Small tars in each format, with long names where the format has them."""
    made = []
    for layout in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=layout) as archive:
            for name in (
                "sa_1.jpg",
                "deep/sa_1.json",
                *(["f" * 120 + ".jpg"] if layout != tarfile.USTAR_FORMAT else []),
            ):
                info = tarfile.TarInfo(name)
                info.size = 600
                archive.addfile(info, io.BytesIO(b"p" * info.size))
        made.append(buffer.getvalue()[: 20 * tar.BLOCK])
    return made


def reseal(data: bytes) -> bytes:
    """A tar whose blocks all have the checksum of a header, so that what stands in them is
    believed."""
    blocks = []
    for start in range(0, len(data), tar.BLOCK):
        block = bytearray(data[start : start + tar.BLOCK])
        if len(block) == tar.BLOCK and any(block):
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
        blocks.append(bytes(block))
    return b"".join(blocks)


def check_words(fault: GigamaskError, beginning: str) -> None:
    """One line that begins with the cause."""
    assert str(fault).startswith(beginning)
    assert "\n" not in str(fault)


def check_scan(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.tar")
        path.write_bytes(data)
        before = tar.scan(path, salvage=True)
        assert all(
            offset + size <= len(data)
            for offset, size in zip(before.offsets.tolist(), before.sizes.tolist(), strict=True)
        )
        try:
            found = tar.scan(path)
        except GigamaskError as fault:
            check_words(fault, str(path))
            return
        assert len(found.names) == len(found.offsets) == len(found.sizes)
        assert all(
            size >= 0 and offset >= tar.BLOCK and offset + size <= len(data)
            for offset, size in zip(found.offsets.tolist(), found.sizes.tolist(), strict=True)
        )


@FUZZ
@given(st.sampled_from(range(3)), edits, st.booleans())
def test_changed_tars(which, changes, sealed):
    data = edit(archives()[which], changes)
    check_scan(reseal(data) if sealed else data)


@FUZZ
@given(
    st.sampled_from(range(3)),
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from([(0, 100), (124, 12), (148, 8), (156, 1), (257, 8), (345, 155)]),
            st.one_of(
                st.binary(max_size=20),
                st.from_regex(r"[0-7]{1,12}", fullmatch=True).map(str.encode),
                st.sampled_from([b"\x80", b"\xff" * 12]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([b"0", b"x", b"g", b"L", b"K", b"S", b"5", b"\0", b"7", b"V"]),
)
def test_headers_that_say_anything(which, changes, kind):
    """Fields of headers are replaced and the checksums made right again."""
    data = bytearray(archives()[which])
    data[156:157] = kind
    for header, (at, width), value in changes:
        start = header * tar.BLOCK + at
        data[start : start + min(width, len(value))] = value[:width]
    check_scan(reseal(bytes(data)))


@FUZZ
@given(st.binary(max_size=3000), st.booleans())
def test_random_bytes_are_no_tar_and_no_annotation_and_no_jpg(data, sealed):
    check_scan(reseal(data) if sealed else data)
    for reader in (annotation.parse, image.size, image.decode):
        with corrupt_sample(r"^x: "):
            reader(data, "x")


def check_parse(raw: bytes) -> None:
    try:
        entry = annotation.parse(raw, "x")
    except CorruptSampleError as bad:
        check_words(bad, "x: ")
        return
    height, width = entry.size
    assert 0 < height * width <= image.MAX_PIXELS
    assert len(entry.masks) == len(entry.predicted_iou) == len(entry.stability_score)
    assert np.isfinite(entry.predicted_iou).all()
    assert np.isfinite(entry.stability_score).all()
    assert ((entry.masks.areas() >= 0) & (entry.masks.areas() <= height * width)).all()


@FUZZ
@given(st.integers(0, broken.SCENES - 1), edits)
def test_changed_annotations(number, changes):
    check_parse(edit(broken.scenes()[number][1], changes))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 30)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
coco_text = st.text(st.characters(min_codepoint=45, max_codepoint=113), max_size=30)
masks = st.fixed_dictionaries(
    {
        "segmentation": st.fixed_dictionaries(
            {
                "size": st.just([4, 5]) | anything,
                "counts": st.just([3, 17])
                | st.lists(st.integers(0, 20), max_size=6)
                | coco_text
                | anything,
            }
        ),
        "predicted_iou": st.floats(0, 1) | anything,
        "stability_score": st.just(1) | anything,
    }
)
records = st.fixed_dictionaries(
    {
        "image": st.fixed_dictionaries(
            {
                "image_id": st.integers(0, 9) | anything,
                "width": st.just(5) | anything,
                "height": st.just(4) | anything,
            }
        )
        | anything,
        "annotations": st.lists(masks | anything, max_size=4) | anything,
    }
)


@FUZZ
@given(records | anything)
def test_annotations_of_any_values(record):
    check_parse(json.dumps(record).encode("utf-8", "surrogatepass"))


wild = (
    coco_text
    | st.binary(max_size=20)
    | st.lists(st.integers(-3, 60), max_size=8)
    | st.lists(
        st.integers(-(2**70), 2**70)
        | st.floats()
        | st.booleans()
        | st.none()
        | st.text(max_size=2),
        max_size=5,
    )
)


@FUZZ
@given(
    st.lists(st.lists(st.booleans(), min_size=12, max_size=12) | wild, max_size=4),
    st.tuples(st.integers(-1, 8), st.integers(-1, 8)) | st.just((3, 4)),
)
def test_run_lengths_of_anything(masks, size):
    """Twelve bools are a mask of 3 x 4 pixels, so that what is sound comes up as well."""
    dense = [
        np.array(mask).reshape(1, 3, 4) if len(mask) == 12 and isinstance(mask[0], bool) else None
        for mask in masks
    ]
    counts = [
        mask if picture is None else RLEMasks.from_dense(picture).to_coco()[0]
        for mask, picture in zip(masks, dense, strict=True)
    ]
    try:
        runs = RLEMasks.from_coco(counts, size)
    except GigamaskError as fault:
        check_words(fault, "")
        return
    assert len(runs) == len(counts)
    again = RLEMasks.from_coco(runs.to_coco(), size)
    assert np.array_equal(again.bounds, runs.bounds)
    for area, picture in zip(runs.areas(), dense, strict=True):
        assert 0 <= area <= size[0] * size[1]
        assert picture is None or size != (3, 4) or area == picture.sum()


@cache
def pictures() -> list[bytes]:
    """JPEGs of each color space, progressive or not, with metadata; one of two pictures; and
    samplings that only Pillow or no one encodes."""
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x112] = 6
    made = []
    for mode in ("RGB", "L", "CMYK"):
        for progressive in (False, True):
            buffer = io.BytesIO()
            pixels.convert(mode).save(
                buffer,
                "JPEG",
                quality=60,
                progressive=progressive,
                exif=exif,
                dpi=(72, 72),
                icc_profile=b"p" * 50,
            )
            made.append(buffer.getvalue())
    buffer = io.BytesIO()
    pixels.save(buffer, "MPO", save_all=True, append_images=[pixels])
    made.append(buffer.getvalue())
    at = made[0].index(b"\xff\xc0") + 11
    made += [
        made[0][:at] + bytes([sampling]) + made[0][at + 1 :] for sampling in (0x31, 0x14, 0x44)
    ]
    return made


@pytest.mark.filterwarnings("ignore")  # Pillow warns of odd metadata
@settings(FUZZ, max_examples=600)
@given(st.sampled_from(range(10)), edits, st.booleans(), st.booleans())
def test_changed_pictures(which, changes, early, half):
    """`early` keeps the changes to the headers."""
    data = pictures()[which]
    data = edit(data[:700], changes) + data[700:] if early else edit(data, changes)
    try:
        size = image.size(data, "x")
        assert 0 < size[0] * size[1] <= image.MAX_PIXELS
        pixels = image.decode(data, "x", size, half)
    except CorruptSampleError as bad:
        check_words(bad, "x: ")
        return
    assert pixels.shape == ((-(-size[0] // 2), -(-size[1] // 2), 3) if half else (*size, 3))


def test_every_sampling_has_a_size():
    """4:4:1 raises a KeyError in simplejpeg, 3x1 is unknown to libjpeg-turbo."""
    assert [image.size(data, "x") for data in pictures()] == [(40, 48)] * 10


def header(kind: bytes, size: bytes) -> bytes:
    """One header, its checksum right."""
    block = bytearray(tar.BLOCK)
    block[:5], block[124:136], block[156:157], block[257:265] = b"a.jpg", size, kind, b"ustar\x0000"
    return reseal(bytes(block))


def make_claims(folder: Path) -> None:
    """Gives the readers what states enormous sizes, in an address space that cannot hold them;
    prints how much was refused."""
    sizes = (
        b"\x80" + (2**62).to_bytes(11, "big"),
        b"\x80" + (2**33 - 512).to_bytes(11, "big"),
        b"77777777777\0",
        b"\xff" * 12,
    )
    starts = [header(kind, size) for kind in (b"x", b"g", b"L", b"K", b"S", b"0") for size in sizes]
    for records in (
        b"30 size=9999999999999999999\n",
        b"28 size=4611686018427387904\n",
        b"99999999999999999999 a=b\n",
    ):
        starts.append(
            header(b"x", b"%011o\0" % len(records))
            + records.ljust(tar.BLOCK, b"\0")
            + header(b"0", b"00000000000\0")
        )
    starts.append(header(b"x", b"00000000000\0") * 5000)
    jsons = []
    for width, height, counts in (
        (2**30, 1, "0"),
        (65_535, 65_535, "0"),
        (65_535, 16_384, [65_535 * 16_384]),
    ):
        jsons.append(json.dumps(broken.described(1, (height, width), [(counts, 1, 1)])).encode())
    jpgs = [
        broken.restate(pictures()[0], *size)
        for size in ((65_535, 65_535), (65_500, 2_100), (16_385, 8_192))
    ]
    readers = [(tar.scan, folder / "t.tar", start) for start in starts]
    readers += [(lambda raw: annotation.parse(raw, "x"), raw, None) for raw in jsons]
    readers += [(lambda raw: image.decode(raw, "x"), raw, None) for raw in jpgs] + [
        (lambda raw: image.size(raw, "x"), raw, None) for raw in jpgs
    ]
    readers += [
        (lambda counts: RLEMasks.from_coco([counts], (2**15, 2**15)), counts, None)
        for counts in ("o" * 10**6, "0" * 10**6, [2**31], [10**30])
    ]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    refused = 0
    for reader, given_to, start in readers:
        if start is not None:
            with open(given_to, "wb") as file:
                file.write(start)
                file.truncate(2**33)  # as long as what is claimed, without taking room
            tar.scan(given_to, salvage=True)
        with contextlib.suppress(GigamaskError):
            reader(given_to)
            print("taken:", given_to if start is None else start[:200])
            continue
        refused += 1
    print(refused, "of", len(readers))


def test_no_claim_is_paid_for_in_memory(tmp_path):
    """Sizes that are only stated are refused within 256 MiB of address space, by the readers and in
    verifying alike."""
    if not sys.platform.startswith("linux"):
        pytest.skip("address space is limited and measured as on Linux")
    command = (
        f"from pathlib import Path; from tests.laws.test_fuzz import make_claims; "
        f"make_claims(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "41 of 41\n"
