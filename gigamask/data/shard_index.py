"""Index one shard (a tar or an image folder): its image and mask columns, and what was left out.

The result depends on the shard alone, so shards can be indexed in any order, saved, and merged
later. Annotations are fetched in groups of concurrent requests.
"""

import os
import posixpath
import re
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from gigamask.data import annotation, image, image_folder, storage, tar
from gigamask.data.checked_files import encode_json, read_json, write_array
from gigamask.data.mask_columns import MASK_COLUMNS, Described, Record, describe, read_record
from gigamask.data.storage import ByteRange
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.files import is_foreign, report_write_errors
from gigamask.records import SkippedSample

Item = TypeVar("Item")

IMAGE_COLUMNS = {
    "jpg_offset": "<i8",
    "jpg_bytes": "<i8",
    "json_offset": "<i8",
    "json_bytes": "<i8",
    "image_id": "<i8",
    "width": "<i4",
    "height": "<i4",
    "masks": "<i4",
    "jpg_crc32": "<u4",
    "json_crc32": "<u4",
}
PART, COLUMNS = "part.json", "columns.npy"
HEADER_BYTES = 2**16
"""A JPEG's size is in its first kilobyte unless a preview or a color profile comes first."""
BATCH_BYTES = 2**17
"""Bytes of jsons whose masks are decoded at once; arrays of more do not fit into the cache."""
GROUP_FILES, GROUP_BYTES = 64, 2**25
"""Largest group that is fetched at once: `storage.MAX_CONCURRENT` files, and 32 MiB."""


class TarFile(msgspec.Struct, frozen=True):
    """A tar or image folder as it was when indexed."""

    path: str
    bytes: int
    version: str


class LeftOut(msgspec.Struct, frozen=True):
    """Contents of a shard that are not indexed.

    `skipped` gives the reason for each unusable image, `broken` the reason why the rest of the tar
    could not be read ("" if all of it was).
    """

    skipped: list[SkippedSample] = msgspec.field(name="rejected")
    json_without_jpg: int
    other_files: int
    broken: str = ""


class ShardSummary(msgspec.Struct, frozen=True):
    """Summary of a saved `ShardIndex`, which merging needs before it reads the columns.

    `checksums` states whether the crc32 of every jpg is recorded; that of a json always is.
    `categories` is the number of masks of each category.
    """

    tar: TarFile
    left_out: LeftOut
    images: int
    masks: int
    name_bytes: int
    checksums: bool = False
    categories: dict[str, int] = {}


@dataclass(frozen=True)
class ShardIndex:
    """The columns of one shard.

    `images` has its rows in stored order, `masks` image by image in the order of the jsons;
    `checksums` and `categories` as in `ShardSummary`.
    """

    tar: TarFile
    images: dict[str, np.ndarray]
    masks: dict[str, np.ndarray]
    left_out: LeftOut
    checksums: bool = False
    categories: dict[str, int] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write a folder of the columns and `part.json` atomically; an existing one is kept."""
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
        temporary.mkdir()
        names = self.images["name"]
        summary = ShardSummary(
            self.tar,
            self.left_out,
            len(names),
            len(self.masks["area"]),
            names.dtype.itemsize,
            self.checksums,
            self.categories,
        )
        # A file for each column would take most of the time of a small tar.
        fields = row_type(summary)
        record = np.array([(*self.images.values(), *self.masks.values())], fields)
        write_array(temporary / COLUMNS, fields, (1,), [record])
        with report_write_errors(temporary / PART):
            (temporary / PART).write_bytes(encode_json(summary))
        try:
            temporary.rename(folder)
        except OSError:
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise


def column_dtypes(name_bytes: int) -> dict[str, str]:
    """Return the dtypes of a shard's columns, as `images_NAME` and `masks_NAME`.

    Args:
        name_bytes: Length of the longest name of an image.
    """
    images = {**IMAGE_COLUMNS, "name": f"|S{name_bytes}"}
    return {f"images_{name}": dtype for name, dtype in images.items()} | {
        f"masks_{name}": dtype for name, dtype in MASK_COLUMNS.items()
    }


def row_type(summary: ShardSummary) -> list[tuple]:
    """Return the dtype of all columns of a saved `ShardIndex` as the fields of one row."""
    rows = {"images": summary.images, "masks": summary.masks}
    return [
        (key, dtype, (rows[key.split("_")[0]], *((4,) if key == "masks_box" else ())))
        for key, dtype in column_dtypes(summary.name_bytes).items()
    ]


def read_summary(folder: Path) -> ShardSummary:
    """Read the summary of a saved `ShardIndex`; raise GigamaskError if it is damaged."""
    return read_json(folder / PART, ShardSummary, "delete its folder")


def stat_shard(path: str) -> TarFile:
    """Return the current size and version of a tar or image folder.

    Raises:
        OSError: A local shard cannot be read.
        GigamaskError: A remote shard cannot be read.
    """
    if image_folder.is_folder(path):
        return TarFile(path, *image_folder.scan(path).state)
    return TarFile(path, *storage.stat(path))


def stat_shards(paths: Sequence[str]) -> list[TarFile]:
    """Return `stat_shard` of each path; remote tars are queried concurrently."""
    tars = [path for path in paths if not image_folder.is_folder(path)]
    stats = dict(zip(tars, storage.stat_all(tars), strict=True))
    return [TarFile(path, *stats[path]) if path in stats else stat_shard(path) for path in paths]


def index_shard(path: str, salvage: bool, checksums: bool) -> ShardIndex:
    """Index a tar or an image folder.

    Args:
        path: The shard.
        salvage: See `index_tar`.
        checksums: See `index_tar`.

    Raises:
        GigamaskError: See `index_tar` and `index_folder`.
    """
    return (
        index_folder(path) if image_folder.is_folder(path) else index_tar(path, salvage, checksums)
    )


def index_folder(path: str) -> ShardIndex:
    """Index the images directly in a folder, without annotations; broken ones are skipped.

    Raises:
        GigamaskError: More than half of the images are broken, or the folder cannot be read.
    """
    try:
        listing = image_folder.scan(path)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be read ({error.strerror}); "
            "check the path, its permissions and the disk"
        ) from error
    if not listing.names:
        raise GigamaskError(
            f"{path}: the folder no longer has any images; put them back, or index without it"
        )
    rows, names, skipped = [], [], []
    files = [
        ByteRange(os.path.join(path, name), 0, size)
        for name, size in zip(listing.names, listing.sizes, strict=True)
    ]
    heads = read_payloads([file._replace(size=min(file.size, HEADER_BYTES)) for file in files])
    for file_name, file, head in zip(listing.names, files, heads, strict=True):
        name = f"{storage.basename(path)}:{file_name}"
        try:
            if isinstance(head, CorruptSampleError):
                raise head
            height, width = read_size(head, file, name)
        except CorruptSampleError as bad:
            skipped.append(SkippedSample(name, str(bad)))
            continue
        image_id = _number(posixpath.splitext(file_name)[0])
        rows.append((0, file.size, -1, 0, image_id, width, height, 0, 0, 0))
        names.append(file_name)
    _check_usable(path, skipped, len(files), "repair it or move it away")
    for other in listing.others:
        if reason := image_folder.why_unread(other):
            skipped.append(SkippedSample(other, f"{storage.basename(path)}:{other}: {reason}"))
    return ShardIndex(
        TarFile(path, *listing.state),
        _image_columns(rows, names),
        {
            key: np.zeros((0, 4) if key == "box" else 0, dtype)
            for key, dtype in MASK_COLUMNS.items()
        },
        LeftOut(skipped, 0, len(listing.others)),
    )


def index_tar(path: str, salvage: bool = False, checksums: bool = False) -> ShardIndex:
    """Index a tar; broken entries are skipped.

    Args:
        path: Local path or URL of the tar.
        salvage: Use the complete entries of a truncated tar.
        checksums: Read every jpg whose header states no crc32, and record its crc32.

    Raises:
        GigamaskError: The tar is unusable, or more than half of its entries are.
    """
    members = tar.scan(path, salvage=True)
    if members.broken and not salvage:
        count = len(members.names)
        hint = f"; 'gigamask index --salvage' uses the {count} files before the break"
        raise GigamaskError(members.broken + hint * bool(count))
    try:
        stored = stat_shard(path)
    except OSError as error:
        raise GigamaskError(
            f"{path}: was removed while it was being indexed ({error.strerror}); "
            "check the disk and run the same command again"
        ) from error
    jpgs, jsons, others, duplicates = pair_members(members)
    _check_names(path, members, jpgs, duplicates)
    unreadable = _read_crcs(path, members, jpgs.values()) if checksums else {}
    rows, tables, names, skipped = [], [], [], []
    categories: Counter[str] = Counter()
    places = list(zip(members.offsets.tolist(), members.sizes.tolist(), strict=True))
    described = _describe_entries(path, members, jpgs, jsons, unreadable, tables)
    for (stem, jpg), found in zip(jpgs.items(), described, strict=True):
        if isinstance(found, CorruptSampleError):
            skipped.append(SkippedSample(f"{storage.basename(path)}:{stem}", str(found)))
            continue
        json = jsons.get(stem, -1)
        place = *places[jpg], *((-1, 0) if json < 0 else places[json])
        crcs = members.crcs.get(jpg, 0), members.crcs.get(json, 0)
        rows.append((*place, *found.about, *crcs))
        categories.update(filter(None, found.categories))
        names.append(stem)
    _check_usable(path, skipped, len(jpgs), "download it again or leave it out")
    masks = {key: np.concatenate([table[key] for table in tables]) for key in MASK_COLUMNS}
    left_out = LeftOut(skipped, len(jsons.keys() - jpgs.keys()), others, members.broken)
    recorded = all(jpg in members.crcs for jpg in set(jpgs.values()) - unreadable.keys())
    return ShardIndex(
        stored, _image_columns(rows, names), masks, left_out, recorded, dict(categories)
    )


def _describe_entries(
    path: str,
    members: tar.Members,
    jpgs: dict[str, int],
    jsons: dict[str, int],
    unreadable: dict[int, CorruptSampleError],
    tables: list[dict[str, np.ndarray]],
) -> Iterator[Described | CorruptSampleError]:
    """Yield what an index has of each entry of a tar, or why it is skipped.

    The crc32 of every json is added to `members`, the mask columns to `tables`.

    Args:
        path: The tar.
        members: Its members.
        jpgs: Member number of each stem's image.
        jsons: The same of the jsons.
        unreadable: Images that cannot be read.
        tables: The mask columns of the entries so far.
    """
    ranges = [
        _range(path, members, jsons.get(stem, jpg), stem in jsons) for stem, jpg in jpgs.items()
    ]

    def read(entry: tuple[str, ByteRange, bytes | CorruptSampleError]) -> Record:
        """Return the name and the json of an entry."""
        stem, _, payload = entry
        name, jpg, json = f"{storage.basename(path)}:{stem}", jpgs[stem], jsons.get(stem)
        if isinstance(payload, CorruptSampleError):
            raise payload
        if jpg in unreadable:
            raise unreadable[jpg]
        if json is None:
            place = ByteRange(path, int(members.offsets[jpg]), int(members.sizes[jpg]))
            return name, _describe_jpg(payload, place, name)
        if len(payload) == members.sizes[json]:
            tar.check_crc(members, json, payload, name)
        record = read_record(payload, name)
        annotation.check_sizes(record, name)
        if json not in members.crcs:
            members.crcs[json] = zlib.crc32(payload)
        return name, record

    entries = zip(jpgs, ranges, read_payloads(ranges), strict=True)
    for batch in _batches(entries, lambda entry: entry[1].size, BATCH_BYTES):
        yield from describe(read, batch, tables)


def _read_crcs(
    path: str, members: tar.Members, jpgs: Iterable[int]
) -> dict[int, CorruptSampleError]:
    """Add the crc32 of every jpg to `members`, and return the errors of those not readable.

    A jpg that is too large to be used is not read, and counts as empty.
    """
    unknown = [jpg for jpg in jpgs if jpg not in members.crcs]
    sizes = members.sizes[unknown]
    spans = zip(
        members.offsets[unknown].tolist(),
        np.where(sizes > image.MAX_BYTES, 0, sizes).tolist(),
        strict=True,
    )
    unreadable = {}
    payloads = read_payloads([ByteRange(path, *span) for span in spans])
    for jpg, payload in zip(unknown, payloads, strict=True):
        if isinstance(payload, CorruptSampleError):
            unreadable[jpg] = payload
        else:
            members.crcs[jpg] = zlib.crc32(payload)
    return unreadable


def _check_names(
    path: str, members: tar.Members, jpgs: dict[str, int], duplicates: list[tuple[int, int]]
) -> None:
    """Raise GigamaskError if two members have the same name or the tar has no jpg."""
    for first, second in duplicates:
        name = posixpath.basename(members.names[first])
        raise GigamaskError(
            f"{path}: two members are named {name} ({members.names[first]}, "
            f"{members.names[second]}); give each image a unique name"
        )
    if not jpgs:
        raise GigamaskError(
            members.broken
            or f"{path}: has no image ({', '.join(image_folder.EXTENSIONS)}) among its "
            f"{len(members.names)} files; give tars of .jpg and .json files, as SA-1B's are"
        )


def _check_usable(path: str, skipped: list[SkippedSample], entries: int, advice: str) -> None:
    """Raise GigamaskError if more than half of a shard's entries are skipped."""
    if 2 * len(skipped) > entries:
        raise GigamaskError(
            f"{path}: {len(skipped)} of its {entries} entries are unusable, but at most half may "
            f"be; {advice} (the first: {skipped[0].reason})"
        )


def _image_columns(rows: list[tuple[int, ...]], names: list[str]) -> dict[str, np.ndarray]:
    """Return the image columns of one or more rows."""
    columns = zip(*rows, strict=True)
    images = {
        key: np.array(column, dtype)
        for (key, dtype), column in zip(IMAGE_COLUMNS.items(), columns, strict=True)
    }
    return images | {"name": np.array([os.fsencode(name) for name in names])}


def _range(path: str, members: tar.Members, member: int, is_json: bool) -> ByteRange:
    """Return the range to read of an entry: its json up to the limit, or the head of its jpg."""
    limit = annotation.MAX_BYTES + 1 if is_json else HEADER_BYTES
    return ByteRange(path, int(members.offsets[member]), min(int(members.sizes[member]), limit))


def read_payloads(ranges: list[ByteRange]) -> Iterator[bytes | CorruptSampleError]:
    """Yield the bytes of each range, fetching a group of bounded size at a time.

    An error of a local disk concerns only that entry and is yielded.

    Raises:
        GigamaskError: A server fails. That may concern all entries, so none is skipped because of
            it.
    """
    for group in _batches(ranges, lambda byte_range: byte_range.size, GROUP_BYTES):
        for byte_range, data in zip(group, storage.read_ranges(group), strict=True):
            if isinstance(data, CorruptSampleError) and storage.is_remote(byte_range.path):
                raise GigamaskError(str(data)) from data
            yield data


def _batches(
    items: Iterable[Item], size_of: Callable[[Item], int], max_bytes: int
) -> Iterator[list[Item]]:
    """Yield batches of at most `GROUP_FILES` items, each ended by that which exceeds its bytes."""
    batch, batch_bytes = [], 0
    for item in items:
        batch.append(item)
        batch_bytes += size_of(item)
        if len(batch) == GROUP_FILES or batch_bytes >= max_bytes:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def pair_members(
    members: tar.Members,
) -> tuple[dict[str, int], dict[str, int], int, list[tuple[int, int]]]:
    """Pair the images and jsons of a tar by stem, ignoring folders.

    Where a stem has a jpg, its images of other formats, such as label images, are other files.

    Returns:
        The member number of each stem's image and of each stem's json, the number of other files,
        and for each duplicate the first member and the later one.
    """
    jpgs: dict[str, int] = {}
    jsons: dict[str, int] = {}
    others, duplicates = 0, []
    parts = [posixpath.splitext(name.rpartition("/")[2]) for name in members.names]
    has_jpg = {stem for stem, extension in parts if extension.lower() in image_folder.JPEG}
    for member, (stem, extension) in enumerate(parts):
        extension = extension.lower()
        is_image = extension in (image_folder.JPEG if stem in has_jpg else image_folder.EXTENSIONS)
        numbers = jpgs if is_image else jsons if extension == ".json" else None
        if numbers is None or is_foreign(stem):  # macOS packs a '._sa_1.jpg' beside each file
            others += 1
        elif stem in numbers:
            duplicates.append((numbers[stem], member))
        else:
            numbers[stem] = member
    return jpgs, jsons, others, duplicates


def _describe_jpg(head: bytes, jpg: ByteRange, name: str) -> annotation.Sa1bRecord:
    """Return the record of an image without a json; its id is the number at the end of its name."""
    height, width = read_size(head, jpg, name)
    return annotation.Sa1bRecord(annotation.ImageRecord(_number(name), width, height), [])


def _number(stem: str) -> int:
    """Return the number at the end of a name, -1 without one."""
    digits = re.search(r"\d{1,18}$", stem, re.ASCII)
    return int(digits.group()) if digits else -1


def read_size(head: bytes, file: ByteRange, name: str) -> tuple[int, int]:
    """Return an image's size from its head, or from the whole file if that is not enough.

    Args:
        head: First bytes of the file.
        file: The whole file, read if needed.
        name: Name of the image in errors.

    Returns:
        (height, width) in pixels.

    Raises:
        CorruptSampleError: The image is broken or too large.
    """
    try:
        return image.size(head, name)
    except CorruptSampleError:
        if file.size > image.MAX_BYTES:
            raise CorruptSampleError(
                f"{name}: has {file.size} bytes, but at most {image.MAX_BYTES} of an image are "
                "read; leave it out"
            ) from None
        [whole] = read_payloads([file])
        if isinstance(whole, CorruptSampleError):
            raise whole from None
        return image.size(whole, name)
