"""`gigamask verify`: everything in some tars, read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

TOLD = 50


@dataclass(frozen=True)
class VerifyCommand:
    """reads everything in tars and names each sample that training could not use"""

    paths: Positional[Annotated[tuple[str, ...], arg(metavar="PATH ...")]]
    """tars, folders of tars, globs, or an index, which is then compared with its tars"""
    checksums: str | None = None
    """list of checksums, as Meta hands it out or md5sum and sha256sum write it"""
    workers: int = 1
    """processes that share the tars"""
    decode: bool = True
    """decode every JPEG; otherwise only its header is read"""
    json: str | None = None
    """file for what was printed, as data: each bad sample with its tar, member, offset and reason"""

    def run(self) -> dict[str, Any]:
        from gigamask.cli.commands.progress import bar
        from gigamask.datatools import checksums, verify

        sums = checksums.read(self.checksums) if self.checksums else {}
        with bar("verify") as progress:
            reports, stale = verify.verify(self.paths, sums, self.decode, self.workers, progress)
        counts = verify.summary(reports)
        bad = [finding for report in reports for finding in report.bad]
        odd = [finding for report in reports for finding in report.odd]
        print(
            f"{counts['tars']} tar{'s' * (counts['tars'] != 1)}: {counts['images']} images with {counts['masks']} masks"
        )
        for what in ("without_json", "without_jpg", "without_masks", "other_members"):
            if counts[what]:
                print(f"  {what.replace('_', ' ')}: {counts[what]}")
        lines = [f"  index {fault}" for fault in stale]
        for report in reports:
            lines += [f"  tar {fault}" for fault in report.faults]
            if report.faults:
                lines.append(
                    f"    {report.images} of its images were found, {len(report.bad_samples)} of them bad"
                )
        lines += [f"  bad {each.tar} {each.member} at {each.offset}: {each.reason}" for each in bad]
        lines += [
            f"  disagrees {each.tar} {each.member} at {each.offset}: {each.reason}" for each in odd
        ]
        for line in lines[:TOLD]:
            print(line)
        if len(lines) > TOLD:
            print(f"  and {len(lines) - TOLD} more, all of them with --json FILE")
        tars = [
            {
                "path": report.path,
                "faults": report.faults,
                "images": report.images,
                "bad": len(report.bad_samples),
            }
            for report in reports
        ]
        done: dict[str, Any] = {**counts, "tars": tars, "index": stale}
        done |= {"bad": [asdict(each) for each in bad], "disagrees": [asdict(each) for each in odd]}
        faults = [
            f"{counts['bad_samples']} of {counts['images'] + counts['without_jpg']} samples are bad"
            * bool(bad),
            f"{counts['broken_tars']} of {counts['tars']} tars are broken"
            * bool(counts["broken_tars"]),
            "the index does not fit its tars" * bool(stale),
        ]
        if any(faults):
            act = "training leaves out bad samples; fetch a broken tar again, move it away, or index it with --salvage"
            done["fault"] = f"{', '.join(filter(None, faults))}; {act}"
        else:
            print("all of it can be used")
        return done
