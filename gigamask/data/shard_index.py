"""What the index holds of one shard: the path of a tar or of a folder of images enters, its image and mask columns leave, with what was left out
and why.

A part depends on its shard alone, so parts may be made in any order, kept, and joined later. Annotations are fetched a group at a time, which
a server answers at once.

Not here: joining parts (`data.columns`), reading them back (`data.index`), tar headers (`data.tar`), listing folders (`data.folder`), servers
(`data.store`).
"""

import os
import posixpath
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from gigamask.data import annotation, image, image_folder, storage, tar
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.types import ImageAnnotation, SkippedSample

IMAGE_COLUMNS = {
    "jpg_offset": "<i8",
    "jpg_bytes": "<i8",
    "json_offset": "<i8",
    "json_bytes": "<i8",
    "image_id": "<i8",
    "width": "<i4",
    "height": "<i4",
    "masks": "<i4",
}
MASK_COLUMNS = {"area": "<i4", "box": "<u2", "predicted_iou": "<f4", "stability_score": "<f4"}
PART = "part.json"
HEADER_BYTES = 2**16
"""A JPEG's size stands in its first kilobyte unless a preview or a colour profile comes first."""
GROUP_FILES, GROUP_BYTES = 64, 2**25
"""What is fetched at once: no more files than a server is asked for at a time, and 32 MiB."""
_JPG = {".jpg", ".jpeg"}


class TarFile(msgspec.Struct, frozen=True):
    """The tar, or folder of images, that a part describes, as it was."""

    path: str
    bytes: int
    version: str


class LeftOut(msgspec.Struct, frozen=True):
    """What a shard holds beside usable images; `rejected` says of each unusable one why, `broken` why what lies further behind could not be read."""

    rejected: list[SkippedSample]
    json_without_jpg: int
    other_files: int
    broken: str = ""


class ShardSummary(msgspec.Struct, frozen=True):
    """What joining needs to know of a part before it reads the columns."""

    tar: TarFile
    left_out: LeftOut
    images: int
    masks: int
    name_bytes: int


@dataclass(frozen=True)
class ShardIndex:
    """The columns of one shard: rows of `images` in stored order, rows of `masks` image by image in the json's order."""

    tar: TarFile
    images: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    left_out: LeftOut

    def save(self, place: Path) -> None:
        """Writes the part as a folder of columns and `part.json`, which appears when it is complete; one that is there already is kept."""
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        partial.mkdir()
        for kind, columns in (("images", self.images), ("masks", self.masks)):
            for name, column in columns.items():
                np.save(partial / f"{kind}_{name}.npy", column)
        names = self.images["name"]
        summary = ShardSummary(
            self.tar, self.left_out, len(names), len(self.masks["area"]), names.dtype.itemsize
        )
        (partial / PART).write_bytes(msgspec.json.encode(summary))
        try:
            partial.rename(place)
        except OSError:
            shutil.rmtree(partial)
            if not place.is_dir():
                raise


def read_summary(place: Path) -> ShardSummary:
    """Returns the summary of a saved part."""
    return msgspec.json.decode((place / PART).read_bytes(), type=ShardSummary)


def stat_shard(path: str) -> TarFile:
    """Returns a tar or a folder of images as it is now; two that differ were not the same bytes. Raises OSError for a local one that is not there."""
    return TarFile(
        path,
        *(image_folder.scan(path).state if image_folder.is_folder(path) else storage.stat(path)),
    )


def stat_shards(paths: Sequence[str]) -> list[TarFile]:
    """Returns `stat_shard` of each path; many servers' answers are waited for at once."""
    tars = [path for path in paths if not image_folder.is_folder(path)]
    states = dict(zip(tars, storage.stat_all(tars), strict=True))
    return [TarFile(path, *states[path]) if path in states else stat_shard(path) for path in paths]


def index_shard(path: str, salvage: bool) -> ShardIndex:
    """Returns the part of a tar or of a folder of images; see `index_tar` and `index_folder`."""
    return index_folder(path) if image_folder.is_folder(path) else index_tar(path, salvage)


def index_folder(path: str) -> ShardIndex:
    """Returns the part of the images that lie in a folder itself; an annotation beside one is not read.

    A broken image is left out and named; raises Fault when more than half of them are, or when the folder cannot be read.
    """
    try:
        found = image_folder.scan(path)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        ) from error
    if not found.names:
        raise GigamaskError(
            f"{path}: the folder holds no image any more; put them back, or index without it"
        )
    rows, names, rejected = [], [], []
    places = [
        ByteRange(os.path.join(path, name), 0, size)
        for name, size in zip(found.names, found.sizes, strict=True)
    ]
    heads = read_payloads([place._replace(size=min(place.size, HEADER_BYTES)) for place in places])
    for file, place, head in zip(found.names, places, heads, strict=True):
        name = f"{storage.basename(path)}:{file}"
        try:
            if isinstance(head, CorruptSampleError):
                raise head
            height, width = read_size(head, place, name)
        except CorruptSampleError as bad:
            rejected.append(SkippedSample(name, str(bad)))
            continue
        rows.append((0, place.size, -1, 0, _number(posixpath.splitext(file)[0]), width, height, 0))
        names.append(file)
    _check_usable(path, rejected, len(places), "mend it or move it away")
    return ShardIndex(
        TarFile(path, *found.state),
        _table(rows, names),
        _no_masks(),
        LeftOut(rejected, 0, found.others),
    )


def index_tar(path: str, salvage: bool = False) -> ShardIndex:
    """Returns one tar's part. A broken entry is left out and named; raises Fault when the tar is unusable or more than half of its entries are.

    With `salvage`, of a tar that breaks off what lies before the break is taken.
    """
    members = tar.scan(path, salvage=True)
    if members.broken and not salvage:
        before = (
            f"; {len(members.names)} files lie before the break, which 'gigamask index --salvage' takes"
            if members.names
            else ""
        )
        raise GigamaskError(members.broken + before)
    try:
        stored = stat_shard(path)
    except OSError as error:
        raise GigamaskError(
            f"{path}: went away while it was indexed ({error.strerror}); check the disk and run the same command again"
        ) from error
    jpgs, jsons, others, twice = pair_members(members)
    for one, other in twice:
        names = f"{members.names[one]}, {members.names[other]}"
        raise GigamaskError(
            f"{path}: two members are called {posixpath.basename(members.names[one])} ({names}); give each image a name of its own"
        )
    if not jpgs:
        raise GigamaskError(
            members.broken
            or f"{path}: holds no .jpg among its {len(members.names)} files; give tars of .jpg and .json files as SA-1B's are"
        )
    rows, tables, names, rejected = [], [], [], []
    described = [
        _place(path, members, jsons.get(stem, jpg), stem in jsons) for stem, jpg in jpgs.items()
    ]
    for (stem, jpg), first in zip(jpgs.items(), read_payloads(described), strict=True):
        name = f"{storage.basename(path)}:{stem}"
        at, size = int(members.offsets[jpg]), int(members.sizes[jpg])
        json = jsons.get(stem)
        try:
            if isinstance(first, CorruptSampleError):
                raise first
            if json is None:
                place, about, table = (
                    (-1, 0),
                    _describe_jpg(first, ByteRange(path, at, size), name),
                    _no_masks(),
                )
            else:
                place = (int(members.offsets[json]), int(members.sizes[json]))
                about, table = _describe_json(first, name)
        except CorruptSampleError as bad:
            rejected.append(SkippedSample(name, str(bad)))
            continue
        rows.append((at, size, *place, *about, len(table["area"])))
        tables.append(table)
        names.append(stem)
    _check_usable(path, rejected, len(jpgs), "fetch it again or leave it out")
    masks = {key: np.concatenate([table[key] for table in tables]) for key in MASK_COLUMNS}
    left_out = LeftOut(rejected, len(jsons.keys() - jpgs.keys()), others, members.broken)
    return ShardIndex(stored, _table(rows, names), masks, left_out)


def _check_usable(path: str, rejected: list[SkippedSample], entries: int, act: str) -> None:
    """Raises Fault when more than half of a shard's entries are left out."""
    if 2 * len(rejected) > entries:
        first = f"the first: {rejected[0].reason}"
        raise GigamaskError(
            f"{path}: {len(rejected)} of its {entries} entries are unusable, at most half may be; {act} ({first})"
        )


def _table(rows: list[tuple[int, ...]], names: list[str]) -> dict[str, np.ndarray]:
    """Returns the image columns of these rows, of which there is one at least."""
    columns = zip(*rows, strict=True)
    images = {
        key: np.array(column, dtype)
        for (key, dtype), column in zip(IMAGE_COLUMNS.items(), columns, strict=True)
    }
    return images | {"name": np.array([os.fsencode(name) for name in names])}


def _place(path: str, members: tar.Members, member: int, whole: bool) -> ByteRange:
    """Returns where what describes an entry lies: a json, as far as one is read, or the head of a jpg."""
    return ByteRange(
        path,
        int(members.offsets[member]),
        min(int(members.sizes[member]), annotation.MAX_BYTES + 1 if whole else HEADER_BYTES),
    )


def read_payloads(places: list[ByteRange]) -> Iterator[bytes | CorruptSampleError]:
    """Yields the bytes of each place, a bounded group of them fetched at once.

    A local disk's error is that entry's own and is yielded; a server's is everyone's, and raises Fault rather than leave good images out.
    """
    group, held = [], 0
    for number, place in enumerate(places):
        group.append(place)
        held += place.size
        if len(group) == GROUP_FILES or held >= GROUP_BYTES or number == len(places) - 1:
            for data in storage.read_ranges(group):
                if isinstance(data, CorruptSampleError) and storage.is_remote(place.path):
                    raise GigamaskError(str(data)) from data
                yield data
            group, held = [], 0


def pair_members(members: tar.Members) -> tuple[dict[str, int], dict[str, int], int, list[tuple[int, int]]]:
    """Returns the member of each stem's jpg, of each stem's json, how many files are neither, and pairs of a stem's first member and a later one.

    Folders do not matter.
    """
    jpgs: dict[str, int] = {}
    jsons: dict[str, int] = {}
    others, twice = 0, []
    for member, name in enumerate(members.names):
        stem, extension = posixpath.splitext(posixpath.basename(name))
        found = (
            jpgs if extension.lower() in _JPG else jsons if extension.lower() == ".json" else None
        )
        if found is None or stem.startswith("."):  # macOS packs a '._sa_1.jpg' beside each file
            others += 1
        elif stem in found:
            twice.append((found[stem], member))
        else:
            found[stem] = member
    return jpgs, jsons, others, twice


def _describe_jpg(head: bytes, place: ByteRange, name: str) -> tuple[int, int, int]:
    """Returns image id, width and height of an image without annotation: the number its name ends in (-1 without), and its header's size."""
    height, width = read_size(head, place, name)
    return _number(name), width, height


def _number(stem: str) -> int:
    """Returns the number that a name ends in, -1 without one."""
    digits = re.search(r"\d{1,18}$", stem, re.ASCII)
    return int(digits.group()) if digits else -1


def read_size(head: bytes, place: ByteRange, name: str) -> tuple[int, int]:
    """Returns the (height, width) of an image from its head, or else from the whole of it, which is read then."""
    try:
        return image.size(head, name)
    except CorruptSampleError:
        if place.size > image.MAX_BYTES:
            raise CorruptSampleError(
                f"{name}: has {place.size} bytes, at most {image.MAX_BYTES} of a JPEG are read; leave it out"
            ) from None
        [whole] = read_payloads([place])
        if isinstance(whole, CorruptSampleError):
            raise whole from None
        return image.size(whole, name)


def _describe_json(raw: bytes, name: str) -> tuple[tuple[int, int, int], dict[str, np.ndarray]]:
    """Returns image id, width and height, and the mask columns."""
    record = annotation.read(raw, name)
    entry = check_record(record, name)
    areas, boxes = entry.masks.areas(), entry.masks.boxes()
    boxes[areas == 0] = (1, 1, 0, 0)
    table = {
        "area": areas,
        "box": boxes,
        "predicted_iou": entry.predicted_iou,
        "stability_score": entry.stability_score,
    }
    described = record.image.image_id, record.image.width, record.image.height
    return described, {key: table[key].astype(dtype) for key, dtype in MASK_COLUMNS.items()}


def check_record(record: annotation.Sa1bRecord, name: str) -> ImageAnnotation:
    """Returns a json's masks and scores once it is known to describe the image that it is named after, and to hold together."""
    stem = posixpath.splitext(posixpath.basename(record.image.file_name))[0]
    if stem and stem != name.rpartition(":")[2]:
        raise CorruptSampleError(
            f"{name}: its json says it describes {record.image.file_name!r}; put each json beside its own jpg"
        )
    return annotation.check(record, name)


def _no_masks() -> dict[str, np.ndarray]:
    return {
        key: np.zeros((0, 4) if key == "box" else 0, dtype) for key, dtype in MASK_COLUMNS.items()
    }
