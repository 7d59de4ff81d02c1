"""Verification: tars enter, all that is in them is read, and whatever training could not use leaves, with its tar, member, offset and reason.

A sample is bad when its jpg or its json is; images without masks, without a json, and jsons without a jpg are none, they are counted. Of a tar that
is broken itself, what lies before the break is read all the same. A stated `area` or `bbox` that the run lengths contradict is no fault either,
since neither is used; it is reported apart.

Not here: fetching tars again (`download`), what makes a tar, a jpg or a json unusable (`data.tar`, `data.image`, `data.annotation`).
"""

import posixpath
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gigamask.data import annotation, image, index, index_format, storage, tar, worker_pool
from gigamask.data.shard_index import (
    HEADER_BYTES,
    TarFile,
    check_record,
    pair_members,
    read_payloads,
    read_size,
    stat_shard,
)
from gigamask.datatools import checksums
from gigamask.errors import CorruptSampleError, GigamaskError
from gigamask.types import ImageAnnotation

BOX_TOLERANCE = 1.0
"""In pixels: SA-1B states widths and heights that are one less than COCO's, and other makers COCO's own."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with one member; `sample` is the name by which an index and its faults know the image, `TAR:IMAGE`."""

    tar: str
    member: str
    offset: int
    sample: str
    reason: str


@dataclass
class TarReport:
    """What one tar holds: `faults` of the tar itself, `bad` members, and `odd` ones, whose stated areas or boxes differ from their run lengths."""

    path: str
    faults: list[str] = field(default_factory=list)
    bad: list[Finding] = field(default_factory=list)
    odd: list[Finding] = field(default_factory=list)
    images: int = 0
    masks: int = 0
    without_masks: int = 0
    without_json: int = 0
    without_jpg: int = 0
    other_members: int = 0

    @property
    def bad_samples(self) -> list[str]:
        return list(dict.fromkeys(finding.sample for finding in self.bad))


def verify(
    paths: index.Paths,
    sums: Mapping[str, str] | None = None,
    decode: bool = True,
    workers: int = 1,
    progress: worker_pool.Progress | None = None,
) -> tuple[list[TarReport], list[str]]:
    """Returns a report for each tar that `paths` means, and what is wrong with the indexes among them.

    `sums` are checksums by name; without `decode` only the JPEGs' headers are read.
    """
    faults = [fault for path in index.as_list(paths) for fault in check_index(path)]
    return worker_pool.parallel_map(
        partial(check_tar, sums=dict(sums or {}), decode=decode),
        index.find_tars(paths),
        workers,
        progress,
    ), faults


def summary(reports: Iterable[TarReport]) -> dict[str, int]:
    """Returns the sums over tars."""
    names = ("images", "masks", "without_masks", "without_json", "without_jpg", "other_members")
    reports = list(reports)
    counts = {"tars": len(reports), "broken_tars": sum(bool(report.faults) for report in reports)}
    counts |= {name: sum(getattr(report, name) for report in reports) for name in names}
    return counts | {
        "bad_samples": sum(len(report.bad_samples) for report in reports),
        "odd_samples": sum(len(report.odd) for report in reports),
    }


def check_index(folder: str | Path) -> list[str]:
    """Returns what is wrong with an index: tars that are gone or changed since, columns that cannot be read. Of anything else, nothing."""
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
            index.Index.open(folder)
        except GigamaskError as fault:
            faults.append(str(fault))
    return faults


def _stale(stored: TarFile) -> str | None:
    """Says how a tar differs from what it was when it was indexed."""
    try:
        now = stat_shard(stored.path)
    except OSError as error:
        return f"tar {stored.path} is gone ({error.strerror}); put it back or index again with 'gigamask index'"
    except GigamaskError as fault:
        return f"tar {fault}"
    if now == stored:
        return None
    what = (
        f"had {stored.bytes} bytes, it has {now.bytes}"
        if now.bytes != stored.bytes
        else "was written since"
    )
    return f"tar {stored.path} {what}; index again with 'gigamask index'"


def check_tar(path: str, sums: Mapping[str, str], decode: bool) -> TarReport:
    """Reads one tar in full."""
    report = TarReport(path)
    listed = sums.get(storage.basename(path))
    try:
        if listed is not None and (found := checksums.digest(path, listed)) != listed:
            report.faults.append(
                f"{path}: its checksum is {found}, the list says {listed}; fetch it again"
            )
        members = tar.scan(path, salvage=True)
        if members.broken:
            published = listed is not None and not report.faults
            report.faults.append(
                members.broken
                + " (but its checksum is the listed one: it was published like this)" * published
            )
        _Reading(report, members, decode).run()
    except GigamaskError as fault:
        report.faults.append(str(fault))
    except OSError as error:
        report.faults.append(
            f"{path}: cannot be read ({error.strerror}); check the path, its permissions and the disk"
        )
    return report


class _Stated(msgspec.Struct):
    """What an annotation says of its mask that the run lengths say too."""

    area: float | None = None
    bbox: tuple[float, float, float, float] | None = None


class _StatedRecord(msgspec.Struct):
    annotations: list[_Stated]


_STATED = msgspec.json.Decoder(_StatedRecord)


@dataclass
class _Reading:
    """The members of one tar, read sample by sample, a bounded group of them at a time."""

    report: TarReport
    members: tar.Members
    decode: bool

    def run(self) -> None:
        """Reads every sample; raises Fault when a server does not give them."""
        jpgs, jsons, self.report.other_members, twice = pair_members(self.members)
        for one, other in twice:
            stem = posixpath.splitext(posixpath.basename(self.members.names[other]))[0]
            self._note(
                self.report.bad,
                other,
                stem,
                f"{self.members.names[one]} has its name; give each image a name of its own",
            )
        stems = dict.fromkeys([*jpgs, *jsons])
        read = read_payloads(
            [self._place(held[stem]) for stem in stems for held in (jsons, jpgs) if stem in held]
        )
        for stem in stems:
            entry = None
            if stem in jsons:
                entry = self._checked(jsons[stem], stem, next(read), self._check_json)
            if stem in jpgs:
                annotated = entry.size if entry is not None else None
                self._checked(
                    jpgs[stem], stem, next(read), partial(self._check_jpg, annotated=annotated)
                )
            self.report.images += stem in jpgs
            self.report.without_json += stem not in jsons
            self.report.without_jpg += stem not in jpgs

    def _place(self, member: int) -> storage.ByteRange:
        """Returns which of a member's bytes are read: of one that is too large, none."""
        size, is_json = (
            int(self.members.sizes[member]),
            self.members.names[member].lower().endswith(".json"),
        )
        wanted = size if is_json or self.decode else min(size, HEADER_BYTES)
        if size > (annotation.MAX_BYTES if is_json else image.MAX_BYTES):
            wanted = 0
        return storage.ByteRange(self.report.path, int(self.members.offsets[member]), wanted)

    def _checked(
        self,
        member: int,
        stem: str,
        data: bytes | CorruptSampleError,
        check: Callable[[int, bytes, str], Any],
    ) -> Any:
        """Returns what the check returns, or None for a member that is bad, which is noted."""
        name, size = f"{storage.basename(self.report.path)}:{stem}", int(self.members.sizes[member])
        try:
            if isinstance(data, CorruptSampleError):
                raise data
            if size and not data:
                raise CorruptSampleError(
                    f"{name}: has {size} bytes, more than are read of one file; leave it out"
                )
            return check(member, data, name)
        except CorruptSampleError as bad:
            self._note(self.report.bad, member, stem, str(bad))
        return None

    def _note(self, findings: list[Finding], member: int, stem: str, reason: str) -> None:
        sample, offset = (
            f"{storage.basename(self.report.path)}:{stem}",
            int(self.members.offsets[member]),
        )
        reason = reason.removeprefix(f"{sample}: ").removeprefix(f"{self.report.path}: ")
        findings.append(
            Finding(self.report.path, self.members.names[member], offset, sample, reason)
        )

    def _check_json(self, member: int, raw: bytes, name: str) -> ImageAnnotation:
        entry = check_record(annotation.read(raw, name), name)
        self.report.masks += len(entry.masks)
        self.report.without_masks += not len(entry.masks)
        odd = contradiction(raw, entry)
        if odd:
            self._note(self.report.odd, member, name.rpartition(":")[2], odd)
        return entry

    def _check_jpg(
        self, member: int, raw: bytes, name: str, annotated: tuple[int, int] | None
    ) -> None:
        if self.decode:
            image.decode(raw, name, annotated)
            return
        found = read_size(
            raw,
            storage.ByteRange(
                self.report.path, int(self.members.offsets[member]), int(self.members.sizes[member])
            ),
            name,
        )
        if annotated is not None:
            image.check_annotated(found, annotated, name)


def contradiction(raw: bytes, entry: ImageAnnotation) -> str | None:
    """Returns how stated areas and boxes differ from the run lengths, or None when they agree; what is not stated agrees."""
    try:
        stated = _STATED.decode(raw).annotations
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return f"an area or bbox is not as SA-1B writes them ({error})"
    areas, boxes = entry.masks.areas(), entry.masks.boxes().astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    words = []
    wrong = [i for i, each in enumerate(stated) if each.area is not None and each.area != areas[i]]
    if wrong:
        example = (
            f"annotation {wrong[0]} states {stated[wrong[0]].area}, its mask has {areas[wrong[0]]}"
        )
        words.append(f"{len(wrong)} of {len(stated)} areas differ, {example}")
    wrong = [
        i
        for i, each in enumerate(stated)
        if each.bbox is not None
        and areas[i]
        and not np.abs(boxes[i] - each.bbox).max() <= BOX_TOLERANCE
    ]
    if wrong:
        example = f"annotation {wrong[0]} states {stated[wrong[0]].bbox}, its mask's is {tuple(boxes[wrong[0]].tolist())}"
        words.append(f"{len(wrong)} of {len(stated)} boxes differ, {example}")
    return "; ".join(words) or None
