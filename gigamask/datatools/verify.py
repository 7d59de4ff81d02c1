"""Verification of tars: read everything and report what training cannot use.

A sample is bad if its jpg or its json is. Images without masks or without a json, and jsons without
a jpg, are only counted, as an index counts them: `images` are the samples that it has, `skipped`
those that it leaves out, and `masks` are those of the former. The intact beginning of a broken tar
is read too. A stated `area` or `bbox` that differs from the run lengths is reported separately,
since neither is used.
"""

import contextlib
import operator
import posixpath
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gigamask.data import (
    annotation,
    image,
    index,
    index_format,
    jpeg_markers,
    storage,
    tar,
    worker_pool,
)
from gigamask.data.index_format import ShardRows
from gigamask.data.mask_columns import read_record
from gigamask.data.shard_index import (
    HEADER_BYTES,
    TarFile,
    pair_members,
    read_payloads,
    read_size,
    stat_shard,
)
from gigamask.data.storage import Paths, path_list
from gigamask.datatools import checksums
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.records import ImageAnnotation
from gigamask.serialization import JSON_ERRORS

BOX_TOLERANCE = 1.0
"""In pixels: widths and heights in SA-1B are one less than in COCO and other data sets."""


@dataclass(frozen=True)
class Finding:
    """A problem of one member; `sample` is the image's name `TAR:IMAGE`, as in an index."""

    tar: str
    member: str
    offset: int
    sample: str
    reason: str


@dataclass
class TarReport:
    """Contents of one tar.

    `tar_errors` are problems of the tar itself, `bad_members` those of members, and `mismatches`
    are members whose stated areas or boxes differ from their run lengths, and `unpaired` those
    without a json or jpg of their name. `without_checksum` is the number of jpgs of unknown crc32,
    `without_end_marker` that of jpgs that lack it alone, which is added when they are read.
    """

    path: str
    tar_errors: list[str] = field(default_factory=list)
    bad_members: list[Finding] = field(default_factory=list)
    mismatches: list[Finding] = field(default_factory=list)
    unpaired: list[Finding] = field(default_factory=list)
    images: int = 0
    skipped: int = 0
    masks: int = 0
    without_masks: int = 0
    without_json: int = 0
    without_jpg: int = 0
    other_members: int = 0
    without_checksum: int = 0
    without_end_marker: int = 0

    @property
    def bad_samples(self) -> list[str]:
        """Names of the samples with a bad member."""
        return list(dict.fromkeys(finding.sample for finding in self.bad_members))


def verify(
    paths: Paths,
    sums: Mapping[str, str] | None = None,
    decode: bool = True,
    workers: worker_pool.Workers = 1,
    progress: worker_pool.Progress | None = None,
) -> tuple[list[TarReport], list[str]]:
    """Verify tars and indexes.

    Args:
        paths: Tars, folders of tars, globs and indexes.
        sums: Checksums by file name.
        decode: Whether to decode the JPEGs; if not, only their headers are read.
        workers: Number of processes, each on one tar at a time; or a part of a command.
        progress: Called as `progress(done, total)` after each tar.

    Returns:
        A report for each tar, and the problems of the indexes.
    """
    recorded = {
        rows.summary.tar.path: rows
        for path in path_list(paths)
        if index_format.is_index(path)
        for rows in index_format.rows_of_index(Path(path))
    }
    checks = [
        partial(check_tar, path, dict(sums or {}), decode, recorded.get(path))
        for path in index.find_tars(paths)
    ]
    reports = worker_pool.parallel_map(operator.call, checks, workers, progress, TarReport)
    return reports, [fault for path in path_list(paths) for fault in check_index(path)]


def summary(reports: Sequence[TarReport]) -> dict[str, int]:
    """Return the sums over tars."""
    names = (
        "images",
        "skipped",
        "masks",
        "without_masks",
        "without_json",
        "without_jpg",
        "other_members",
        "without_checksum",
        "without_end_marker",
    )
    counts = {"tars": len(reports), "broken_tars": sum(bool(each.tar_errors) for each in reports)}
    counts |= {name: sum(getattr(report, name) for report in reports) for name in names}
    return counts | {
        "bad_samples": sum(len(report.bad_samples) for report in reports),
        "mismatched_samples": sum(len(report.mismatches) for report in reports),
    }


def check_index(folder: str | Path) -> list[str]:
    """Return the problems of an index: missing or changed tars, damaged columns.

    The list is empty for anything that is not an index.
    """
    if not index_format.is_index(folder):
        return []
    with ThreadPoolExecutor(storage.MAX_CONCURRENT) as threads:
        faults = [
            f"{folder}: its {fault}"
            for fault in threads.map(_stale, index_format.read_manifest(Path(folder)).tars)
            if fault
        ]
    if not faults:
        try:
            index.Index.open(folder).verify()
        except GigamaskError as fault:
            faults.append(str(fault))
    return faults


def _stale(stored: TarFile) -> str | None:
    """Describe how a tar differs from what was indexed."""
    try:
        now = stat_shard(stored.path)
    except OSError as error:
        return (
            f"tar {stored.path} is missing ({error.strerror}); put it back or index again with"
            " 'gigamask index'"
        )
    except GigamaskError as fault:
        return f"tar {fault}"
    if now == stored:
        return None
    change = (
        f"had {stored.bytes} bytes, now it has {now.bytes}"
        if now.bytes != stored.bytes
        else "has been written since"
    )
    return f"tar {stored.path} {change}; index again with 'gigamask index'"


def check_tar(
    path: str, sums: Mapping[str, str], decode: bool, recorded: ShardRows | None = None
) -> TarReport:
    """Verify one tar.

    Args:
        path: The tar; it may be remote.
        sums: Checksums by file name.
        decode: Whether to decode the JPEGs; if not, only their headers are read.
        recorded: The tar's rows of an index, whose crc32s the payloads are compared with.
    """
    report = TarReport(path)
    listed = sums.get(storage.basename(path))
    try:
        if listed is not None and (actual := checksums.digest(path, listed)) != listed:
            report.tar_errors.append(
                f"{path}: its checksum is {actual}, the list says {listed}; fetch it again"
            )
        members = tar.scan(path, salvage=True)
        if members.broken:
            published = listed is not None and not report.tar_errors
            report.tar_errors.append(
                members.broken
                + " (but its checksum is the listed one: it was published like this)" * published
            )
        if recorded is not None:
            with contextlib.suppress(GigamaskError):  # `check_index` reports a damaged column
                _add_recorded_crcs(members, recorded)
        _TarReader(report, members, decode).run()
    except GigamaskError as fault:
        report.tar_errors.append(str(fault))
    except OSError as error:
        report.tar_errors.append(
            f"{path}: cannot be read ({error.strerror}); check the path, its permissions and the"
            " disk"
        )
    return report


def _add_recorded_crcs(members: tar.Members, recorded: ShardRows) -> None:
    """Add the crc32s of an index to `members`, where no header states one.

    Members are found by offset and size, so those of a tar that was replaced are not compared.
    """
    rows = slice(recorded.first_image, recorded.first_image + recorded.summary.images)
    spans = zip(members.offsets.tolist(), members.sizes.tolist(), strict=True)
    numbers = {span: number for number, span in enumerate(spans)}
    for kind in ("jpg", "json") if recorded.summary.checksums else ("json",):
        offsets, sizes, crcs = (
            recorded.columns.open(f"images_{kind}_{column}")[rows].tolist()
            for column in ("offset", "bytes", "crc32")
        )
        for offset, size, crc in zip(offsets, sizes, crcs, strict=True):
            if (offset, size) in numbers:
                members.crcs.setdefault(numbers[offset, size], crc)


class _Stated(msgspec.Struct):
    """The fields of an annotation that also follow from its run lengths."""

    area: float | None = None
    bbox: tuple[float, float, float, float] | None = None


class _StatedRecord(msgspec.Struct):
    annotations: list[_Stated]


_STATED = msgspec.json.Decoder(_StatedRecord)


@dataclass
class _TarReader:
    """Reader of the members of one tar, sample by sample, a bounded group at a time."""

    report: TarReport
    members: tar.Members
    decode: bool

    def run(self) -> None:
        """Read every sample; raise `GigamaskError` if a server does not send them."""
        jpgs, jsons, self.report.other_members, twice = pair_members(self.members)
        for one, other in twice:
            stem = posixpath.splitext(posixpath.basename(self.members.names[other]))[0]
            self._note(
                self.report.bad_members,
                other,
                stem,
                f"{self.members.names[one]} has the same name; give each image its own",
            )
        stems = dict.fromkeys([*jpgs, *jsons])
        members = [kind[stem] for stem in stems for kind in (jsons, jpgs) if stem in kind]
        read = read_payloads([self._byte_range(member) for member in members])
        for stem in stems:
            entry, sound = None, False
            if stem in jsons:
                entry = self._run_check(jsons[stem], stem, next(read), self._check_json)
            if stem in jpgs:
                annotated = entry.size if entry is not None else None
                check = partial(self._check_jpg, annotated=annotated)
                sound = self._run_check(jpgs[stem], stem, next(read), check)
                self.report.without_checksum += jpgs[stem] not in self.members.crcs
            if stem not in jpgs or stem not in jsons:
                missing = "json" if stem in jpgs else "jpg"
                member = jpgs.get(stem, jsons.get(stem, 0))
                self._note(self.report.unpaired, member, stem, f"has no {missing} of its name")
            if stem not in jpgs:
                self.report.without_jpg += 1
            elif entry is not None or (
                stem not in jsons and (sound or self._has_size(jpgs[stem], stem))
            ):
                self.report.images += 1
                self.report.without_json += entry is None
                self.report.masks += len(entry.masks) if entry is not None else 0
                self.report.without_masks += entry is not None and not len(entry.masks)
            else:
                self.report.skipped += 1

    def _byte_range(self, member: int) -> storage.ByteRange:
        """Return the bytes of a member to read: none if it is too large."""
        whole = self._whole_range(member)
        is_json = self.members.names[member].lower().endswith(".json")
        if whole.size > (annotation.MAX_BYTES if is_json else image.MAX_BYTES):
            return whole._replace(size=0)
        head = whole._replace(size=min(whole.size, HEADER_BYTES))
        return whole if is_json or self.decode else head

    def _run_check(
        self,
        member: int,
        stem: str,
        data: bytes | CorruptSampleError,
        check: Callable[[int, bytes, str], Any],
    ) -> Any:
        """Return the check's result, or None for a bad member, which is added to the report."""
        name, size = f"{storage.basename(self.report.path)}:{stem}", int(self.members.sizes[member])
        try:
            if isinstance(data, CorruptSampleError):
                raise data
            if size and not data:
                raise CorruptSampleError(
                    f"{name}: has {size} bytes, which is too large; leave it out"
                )
            if len(data) == size:
                tar.check_crc(self.members, member, data, name)
            return check(member, data, name)
        except CorruptSampleError as bad:
            self._note(self.report.bad_members, member, stem, str(bad))
        return None

    def _note(self, findings: list[Finding], member: int, stem: str, reason: str) -> None:
        sample = f"{storage.basename(self.report.path)}:{stem}"
        offset = int(self.members.offsets[member])
        reason = reason.removeprefix(f"{sample}: ").removeprefix(f"{self.report.path}: ")
        findings.append(
            Finding(self.report.path, self.members.names[member], offset, sample, reason)
        )

    def _check_json(self, member: int, raw: bytes, name: str) -> ImageAnnotation:
        entry = annotation.check(read_record(raw, name), name)
        mismatch = find_differences(raw, entry)
        if mismatch:
            self._note(self.report.mismatches, member, name.rpartition(":")[2], mismatch)
        return entry

    def _check_jpg(
        self, member: int, raw: bytes, name: str, annotated: tuple[int, int] | None
    ) -> bool:
        if self.decode:
            image.read_stored(raw, name, annotated, is_check=True)
            self.report.without_end_marker += jpeg_markers.with_end(raw) != raw
        else:
            found = read_size(raw, self._whole_range(member), name)
            if annotated is not None:
                image.check_size(found, annotated, f"{name}: the JPEG", "its annotation")
        return True

    def _has_size(self, member: int, stem: str) -> bool:
        """Return whether a bad jpg without a json is still in an index: if its header is intact."""
        whole = self._whole_range(member)
        [head] = read_payloads([whole._replace(size=min(whole.size, HEADER_BYTES))])
        if isinstance(head, CorruptSampleError):
            return False
        try:
            read_size(head, whole, stem)
        except CorruptSampleError:
            return False
        return True

    def _whole_range(self, member: int) -> storage.ByteRange:
        return storage.ByteRange(
            self.report.path, int(self.members.offsets[member]), int(self.members.sizes[member])
        )


def find_differences(raw: bytes, entry: ImageAnnotation) -> str | None:
    """Return how stated areas and boxes differ from the run lengths, or None if they agree.

    Args:
        raw: The json of an image.
        entry: Its masks.
    """
    try:
        stated = _STATED.decode(raw.removeprefix(BOM_UTF8)).annotations
    except JSON_ERRORS as error:
        return f"an area or bbox is not in SA-1B's format ({error})"
    areas, boxes = entry.masks.areas(), entry.masks.boxes().astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    differences = []
    wrong = [i for i, one in enumerate(stated) if one.area is not None and one.area != areas[i]]
    if wrong:
        example = (
            f"annotation {wrong[0]} states {stated[wrong[0]].area}, its mask has {areas[wrong[0]]}"
        )
        differences.append(f"{len(wrong)} of {len(stated)} areas differ, {example}")
    wrong = [
        i
        for i, one in enumerate(stated)
        if one.bbox is not None
        and areas[i]
        and not np.abs(boxes[i] - one.bbox).max() <= BOX_TOLERANCE
    ]
    if wrong:
        actual = tuple(boxes[wrong[0]].tolist())
        example = f"annotation {wrong[0]} states {stated[wrong[0]].bbox}, its mask's is {actual}"
        differences.append(f"{len(wrong)} of {len(stated)} boxes differ, {example}")
    return "; ".join(differences) or None
