"""Shards with every defect that data can have, made of valid synthetic scenes: each defect has a
name, a function that makes it, and the expected message.
"""

import functools
import gzip
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import simplejpeg

from gigamask.data import tar
from gigamask.synthetic import scenes as synthetic

SCENES = 4


@functools.cache
def scenes() -> list[tuple[bytes, bytes]]:
    """The jpg and json of a few small scenes."""
    with tempfile.TemporaryDirectory() as folder:
        path = synthetic.write(folder, SCENES, seed=5, long_side=(96, 128))[0]
        members, raw = tar.scan(path), path.read_bytes()
    found = {
        name: raw[start : start + size]
        for name, start, size in zip(members.names, members.offsets, members.sizes, strict=True)
    }
    return [(found[f"sa_{number}.jpg"], found[f"sa_{number}.json"]) for number in range(SCENES)]


def sound(number: int) -> tuple[bytes, dict]:
    """A sound sample that may be called `sa_{number}`: its jpg, and its json as data."""
    jpg, raw = scenes()[number % SCENES]
    record = json.loads(raw)
    record["image"] |= {"image_id": number, "file_name": f"sa_{number}.jpg"}
    return jpg, record


def members(number: int, jpg: bytes | None, record: dict | bytes | None) -> list[tuple[str, bytes]]:
    """The members of `sa_{number}`; None leaves one out."""
    raw = json.dumps(record).encode() if isinstance(record, dict) else record
    return [
        (name, data)
        for name, data in ((f"sa_{number}.jpg", jpg), (f"sa_{number}.json", raw))
        if data is not None
    ]


def samples(*numbers: int) -> list[tuple[str, bytes]]:
    """The members of valid samples."""
    return [member for number in numbers for member in members(number, *sound(number))]


def described(number: int, size: tuple[int, int], masks: Iterable[tuple]) -> dict:
    """The json of `sa_{number}` as data; a mask is its counts and its two scores."""
    height, width = size
    image = {"image_id": number, "width": width, "height": height, "file_name": f"sa_{number}.jpg"}
    annotations = [
        {
            "segmentation": {"size": [height, width], "counts": counts},
            "predicted_iou": predicted_iou,
            "stability_score": stability_score,
        }
        for counts, predicted_iou, stability_score in masks
    ]
    return {"image": image, "annotations": annotations}


def write_plain(path: Path, held: list[tuple[str, bytes]]) -> None:
    """Writes a tar as other programs do: its headers state no crc32 of the payloads."""
    with tarfile.open(path, "w") as archive:
        for name, data in held:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def flip(path: Path, bit: int) -> None:
    """Flips one bit of a file, a negative one from its end; the file's times stay as they were."""
    times = path.stat()
    at = bit // 8 % times.st_size
    with open(path, "r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit % 8]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def restate(jpg: bytes, height: int, width: int) -> bytes:
    """A JPEG whose header states another size."""
    at = jpg.index(b"\xff\xc0") + 5
    return jpg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpg[at + 4 :]


def interrupt(jpg: bytes) -> bytes:
    """A JPEG with something else in the middle of its pixels."""
    middle = (jpg.index(b"\xff\xda") + len(jpg)) // 2
    return jpg[:middle] + b"\xff\xd3" * 20 + jpg[middle + 40 :]


def noise(height: int, width: int) -> bytes:
    return simplejpeg.encode_jpeg(
        np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    )


JPG_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "truncated": (
        lambda jpg: jpg[: len(jpg) * 2 // 3],
        r"the JPEG of \d+ bytes cannot be decoded \(.*\)",
    ),
    "corrupt": (interrupt, r"the JPEG of \d+ bytes cannot be decoded"),
    "not a JPEG": (
        lambda jpg: b"\x89PNG\r\n\x1a\n" + jpg[8:],
        r"the \d+ bytes are not a valid JPEG",
    ),
    "empty": (lambda jpg: b"", r"the 0 bytes are not a valid JPEG"),
    "bomb": (
        lambda jpg: restate(jpg, 60_000, 60_000),
        r"the JPEG states 60000 x 60000 pixels.*134217728",
    ),
    "other size": (lambda jpg: noise(40, 56), r"the JPEG has 40 x 56 pixels.*annotation \d+ x \d+"),
}


def _counts(counts: Callable[[int], list[int] | str]) -> Callable[[dict], dict]:
    """Replaces the first mask's counts by some that depend on the number of pixels."""

    def change(record: dict) -> dict:
        record["annotations"][0]["segmentation"]["counts"] = counts(
            record["image"]["height"] * record["image"]["width"]
        )
        return record

    return change


def _set(*path: str | int, value: object) -> Callable[[dict], dict]:
    def change(record: dict) -> dict:
        place = record
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return record

    return change


def _without(record: dict) -> dict:
    del record["annotations"][0]["stability_score"]
    return record


SIZE = ("annotations", 0, "segmentation", "size")
JSON_FAULTS: dict[str, tuple[Callable[[dict], dict | bytes], str]] = {
    "cut": (
        lambda record: json.dumps(record).encode()[:-40],
        r"its json of \d+ bytes is not an SA-1B annotation",
    ),
    "empty": (lambda record: b"", r"its json of 0 bytes is not an SA-1B annotation"),
    "no text": (
        lambda record: json.dumps(record).encode().replace(b"sa_", b"\xff\xfe_"),
        r"its json of \d+ bytes is not an SA-1B annotation",
    ),
    "nested": (
        lambda record: json.dumps(record).encode()[:-1] + b', "more": ' + b"[" * 10**5 + b"}",
        r"its json of \d+ bytes is not an SA-1B annotation",
    ),
    "a list": (lambda record: b"[]", r"its json of 2 bytes is not an SA-1B annotation"),
    "a field is missing": (
        _without,
        r"is not an SA-1B annotation \(Object missing required field `stability_score`",
    ),
    "another image's": (
        _set("image", "file_name", value="sa_9999.jpg"),
        r"its json describes 'sa_9999.jpg'",
    ),
    "NaN": (
        _set("annotations", 0, "predicted_iou", value=float("nan")),
        r"is not an SA-1B annotation",
    ),
    "infinite": (
        _set("annotations", 0, "stability_score", value=1e39),
        r"annotation 0 has stability_score 1e\+39",
    ),
    "RLE short": (
        _counts(lambda pixels: [10, pixels - 11]),
        r"mask 0: run lengths sum to \d+, the image has \d+ x \d+ = \d+ pixels",
    ),
    "RLE negative": (
        _counts(lambda pixels: [10, -5, pixels - 5]),
        r"mask 0: run length -5 \(number 1\) is negative",
    ),
    "RLE too long": (_counts(lambda pixels: [10, pixels]), r"mask 0: run lengths sum to \d+"),
    "RLE beyond the image": (
        _counts(lambda pixels: [pixels + 1]),
        r"mask 0: run length \d+ \(number 0\) is too long",
    ),
    "RLE huge": (
        _counts(lambda pixels: [2**63, 1]),
        r"mask 0: run lengths must be a string or a list|not an SA-1B annotation",
    ),
    "RLE huge text": (
        _counts(lambda pixels: "o" * 12 + "0"),
        r"mask 0: a number has 13 characters, at most 7",
    ),
    "RLE cut": (_counts(lambda pixels: "PoP"), r"mask 0: the counts end within a number"),
    "RLE other characters": (_counts(lambda pixels: "a b"), r"mask 0: byte 32 at position 1"),
    "RLE none": (_counts(lambda pixels: ""), r"mask 0: run lengths sum to 0"),
    "mask of another size": (
        _set(*SIZE, value=[4, 4]),
        r"annotation 0 has 4 x 4 pixels, but its image \d+ x \d+",
    ),
    "mask of a huge size": (
        _set(*SIZE, value=[2**40, 2**40]),
        r"annotation 0 has 1099511627776 x 1099511627776",
    ),
    "image of no pixels": (
        _set("image", "width", value=0),
        r"its json states \d+ x 0 pixels, but sides must be 1 to 65535",
    ),
    "image of a billion pixels": (
        _set("image", "width", value=2**30),
        r"its json states \d+ x 1073741824 pixels, but sides must be 1 to 65535",
    ),
}


def _cut(raw: bytes, at: int) -> bytes:
    return raw[:at]


def _starts(raw: bytes) -> list[int]:
    """Where the headers of a tar of plain members lie, and its end mark."""
    starts = [0]
    while raw[starts[-1]]:
        starts.append(
            starts[-1] + 512 + -(-int(raw[starts[-1] + 124 : starts[-1] + 135], 8) // 512) * 512
        )
    return starts


def _overwrite(raw: bytes, at: int, data: bytes) -> bytes:
    return raw[:at] + data + raw[at + len(data) :]


# Each with how many of four samples lie whole before the break.
TAR_FAULTS: dict[str, tuple[Callable[[bytes], bytes], str, int]] = {
    "cut in a payload": (
        lambda raw: _cut(raw, _starts(raw)[6] + 700),
        r"member 7 \(sa_3.jpg\) ends at \d+, but the file has \d+ bytes;",
        3,
    ),
    "cut between members": (
        lambda raw: _cut(raw, _starts(raw)[4]),
        r"after member 4 \(sa_1.json\) without the zero blocks",
        2,
    ),
    "cut before the end mark": (
        lambda raw: _cut(raw, _starts(raw)[8]),
        r"after member 8 \(sa_3.json\) without the zero blocks",
        4,
    ),
    "cut in a header": (
        lambda raw: _cut(raw, _starts(raw)[2] + 300),
        r"after member 2 \(sa_0.json\) without the zero blocks",
        1,
    ),
    "empty": (lambda raw: b"", r"the file ends at 0 bytes before its first member", 0),
    "bad header": (
        lambda raw: _overwrite(raw, _starts(raw)[4], b"?"),
        r"the 512 bytes at \d+ are not a tar header",
        2,
    ),
    "bad size": (
        lambda raw: _overwrite(raw, _starts(raw)[4] + 124, b"\xff" * 12),
        r"(states no size|not a tar header)",
        2,
    ),
    "zeros between": (
        lambda raw: raw[: _starts(raw)[4]] + bytes(512) + raw[_starts(raw)[4] :],
        r"one zero block at byte \d+ ",
        2,
    ),
    "joined": (lambda raw: raw + raw, r"bytes; it was downloaded in part, .* several tars", 4),
    "preallocated": (
        lambda raw: raw + bytes(2**20),
        r"the archive ends at \d+, but the file has \d+ bytes",
        4,
    ),
    "compressed": (lambda raw: gzip.compress(raw), r"the 512 bytes at 0 .*tar.gz", 0),
}


def write_samples(path: Path, faulty: int | None = None) -> dict[str, tuple[str, str]]:
    """Writes one tar with a sample for each defect between valid ones, and returns the member and
    the expected message of each bad sample.

    `faulty` takes only the first so many.
    """
    kinds = [("jpg", *fault) for fault in JPG_FAULTS.values()] + [
        ("json", *fault) for fault in JSON_FAULTS.values()
    ]
    held, bad = samples(0), {}
    for number, (kind, change, words) in enumerate(kinds[:faulty]):
        jpg, record = sound(2 * number + 1)
        held += members(
            2 * number + 1, *((change(jpg), record) if kind == "jpg" else (jpg, change(record)))
        )
        bad[f"{path.name}:sa_{2 * number + 1}"] = (f"sa_{2 * number + 1}.{kind}", words)
        if number % 3 == 0:
            held += samples(2 * number + 2)
    tar.write(path, held)
    return bad


def write_tars(folder: Path) -> dict[str, tuple[str, int]]:
    """Writes a tar of four valid samples for each defect of tars, and returns the expected message
    and the number of samples before the break of each file."""
    whole = folder / "whole.tar"
    tar.write(whole, samples(*range(4)))
    raw = whole.read_bytes()
    told = {}
    for name, (change, words, before) in TAR_FAULTS.items():
        (folder / f"{name}.tar").write_bytes(change(raw))
        told[f"{name}.tar"] = (words, before)
    return told
