"""`gigamask verify`: read everything in tars and report what is unusable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from gigamask.launch import PartOptions
from gigamask.parser import Positional

MAX_LINES = 50
"""Maximum number of faults printed; `--json` has all."""


@dataclass(frozen=True)
class VerifyCommand(PartOptions):
    """read everything in tars, and list the samples that training cannot use"""

    paths: Annotated[tuple[str, ...], Positional("PATH ...")]
    """tars, folders of tars, globs, or an index, which is compared with its tars, and every file
    with the crc32 recorded by 'gigamask index --checksums'"""
    checksums: str | None = None
    """file of checksums: Meta's list, or the output of md5sum or sha256sum"""
    workers: int = 1
    """number of processes; each works on one tar at a time"""
    decode: bool = True
    """decode every JPEG; with --no-decode only its header is read"""
    json: str | None = None
    """write the results to this JSON file: tar, member, offset and reason of each bad sample"""

    def run(self) -> dict[str, Any]:
        """Verify the tars, and return the counts and faults."""
        from gigamask.data import storage, worker_pool
        from gigamask.datatools import checksums, verify
        from gigamask.errors import counted, printable
        from gigamask.progress import progress_bar

        sums = checksums.read(self.checksums) if self.checksums else {}
        workers = worker_pool.workers_of(self.part, self.workers)
        with progress_bar("verify") as progress:
            reports, stale = verify.verify(self.paths, sums, self.decode, workers, progress)
        counts = verify.summary(reports)
        kinds = {"bad_members": "bad", "mismatches": "mismatch", "unpaired": "unpaired"}
        found = {
            kind: [one for report in reports for one in getattr(report, kind)] for kind in kinds
        }
        unlisted = [one.path for one in reports if sums and storage.basename(one.path) not in sums]
        _print_counts(counts, self.decode, unlisted)
        lines = [f"  index {fault}" for fault in stale]
        for report in reports:
            lines += [f"  tar {error}" for error in report.tar_errors]
            if report.tar_errors:
                read, bad = report.images + report.skipped, len(report.bad_samples)
                lines.append(f"    {read} of its images were read, {bad} of them bad")
        for kind, label in kinds.items():
            for one in found[kind]:
                lines.append(f"  {label} {one.tar} {one.member} at {one.offset}: {one.reason}")
        for line in lines[:MAX_LINES]:
            print(printable(line))
        if len(lines) > MAX_LINES:
            print(f"  and {len(lines) - MAX_LINES} more; --json FILE writes all of them")
        result: dict[str, Any] = {
            **counts,
            "tars": [
                {
                    "path": report.path,
                    "tar_errors": report.tar_errors,
                    "images": report.images,
                    "bad_samples": len(report.bad_samples),
                }
                for report in reports
            ],
            "index": stale,
            "unlisted": unlisted,
            **{kind: [asdict(one) for one in findings] for kind, findings in found.items()},
        }
        tars = counted(counts["tars"], "tar")
        samples = counts["images"] + counts["skipped"] + counts["without_jpg"]
        faults = [
            f"{counts['bad_samples']} of {samples} samples are bad" if found["bad_members"] else "",
            f"{counts['broken_tars']} of {tars} broken" if counts["broken_tars"] else "",
            "the index does not match its tars" if stale else "",
            "" if samples or counts["broken_tars"] else "there is no image",
        ]
        if any(faults):
            result["fault"] = (
                f"{', '.join(filter(None, faults))}; training skips only samples that it cannot "
                "read; download a broken tar again, remove it, or index it with --salvage"
            )
        else:
            print("no errors")
        return result


def _print_counts(counts: dict[str, int], decode: bool, unlisted: Sequence[str]) -> None:
    from gigamask.errors import counted, printable

    tars, images = counted(counts["tars"], "tar"), counted(counts["images"], "image")
    print(f"{tars}: {images} with {counted(counts['masks'], 'mask')}")
    for name in ("skipped", "without_json", "without_jpg", "without_masks", "other_members"):
        if counts[name]:
            print(f"  {name.replace('_', ' ')}: {counts[name]}")
    if unlisted:
        others = counted(len(unlisted), "tar")
        print(printable(f"  {others} not listed in --checksums, such as {unlisted[0]}"))
    if counts["without_end_marker"]:
        jpegs = counted(counts["without_end_marker"], "JPEG")
        print(f"  {jpegs} without the end marker: all rows are there, it is added in memory")
    if decode and counts["without_checksum"]:
        jpegs = counted(counts["without_checksum"], "JPEG")
        print(
            f"  {jpegs} without a checksum: flipped bits are found only where they break "
            "decoding; 'gigamask index PATH --out INDEX --checksums' records checksums, "
            "'gigamask verify INDEX' compares them"
        )
