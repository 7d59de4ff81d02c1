"""Read run folders: configuration, metrics, evaluations, faults, checkpoints and pictures.

The run may still be training, damaged, or made by others. Damaged lines are counted and damaged
files are named; both are left out, and missing files leave their part empty. If steps were trained
twice, after a restart from a checkpoint, the later records count.
This module does not import torch, since a run is read repeatedly while it trains.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gigamask.errors import GigamaskError
from gigamask.models import manifest
from gigamask.report import schema
from gigamask.serialization import (
    MAX_JSON_BYTES,
    decode_json,
    flatten_yaml,
    read_json,
    read_limited,
    read_yaml,
)

Events = list[dict[str, Any]]
CONFIG, METRICS, ORIGIN, SCORES = "config.yaml", "metrics.jsonl", "origin.jsonl", "evaluation.json"
INSIDE = ("checkpoints", "evaluation", "tensorboard", "pictures", "profile")
"""Subfolders of a run that hold no other run."""
MAX_DEPTH = 4
"""Levels of subfolders that are searched for runs."""
MAX_COLUMNS = 64
"""Metrics, and scores of an evaluation, that are read; a run has a few dozen."""
REPEATED_EVENTS = ("skipped_sample", "skipped_step")
"""Events that recur when a step is trained again."""
KINDS = (
    "resumed",
    "corrupt_checkpoints",
    "skipped_sample",
    "skipped_step",
    "save_failed",
    "leak",
)
"""Kinds of faults: resumed runs, corrupt checkpoints, skipped samples, skipped steps, failed saves,
memory leaks."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, as its manifest describes it; `fault` is the damage found, or None."""

    name: str
    step: int
    samples: int | None
    bytes: int
    written: str
    score: float | None
    scored_by: str | None
    best: bool
    fault: str | None


@dataclass(frozen=True)
class Picture:
    """One picture file of a run, with its training step if it has one."""

    path: str
    name: str
    step: int | None


@dataclass(frozen=True)
class History:
    """The contents of a run folder; everything except `folder` can be written as JSON.

    Attributes:
        folder: The run folder.
        config: Flags and their values as text.
        origin: Command, versions and revision of each start.
        records: Metrics as columns of equal length; None where a step has no value.
        evaluations: Evaluations in training, each with `step`, `scores`, what they are means `of`,
            the `subject` that was scored, `warnings` and `seconds`.
        faults: Events by kind (`KINDS`), each with `step`.
        starts: Starts of training, each with `step`, `time` and `device`.
        checkpoints: The checkpoints, oldest first.
        pictures: Pictures made in training by step, then the others by name.
        scores: The contents of evaluation.json.
        invalid_lines: Number of damaged lines of metrics.jsonl.
        damaged: Damaged files that were left out, and why.
        verified: Whether checkpoint contents were verified, not only their manifests and sizes.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    origin: Events = field(default_factory=list)
    records: dict[str, list[Any]] = field(default_factory=lambda: {"step": []})
    evaluations: Events = field(default_factory=list)
    faults: dict[str, Events] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    starts: Events = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    scores: dict[str, Any] | None = None
    invalid_lines: int = 0
    damaged: list[str] = field(default_factory=list)
    verified: bool = False

    @property
    def step(self) -> int:
        """The last step that was recorded, evaluated or saved, 0 before the first."""
        evaluated = [evaluation["step"] for evaluation in self.evaluations[-1:]]
        saved = [each.step for each in self.checkpoints if each.fault is None][-1:]
        return max([0, *self.records["step"][-1:], *evaluated, *saved])

    @property
    def steps(self) -> int | None:
        """The configured number of steps."""
        return count_of(self.config, "steps")

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show yet."""
        return not (self.records["step"] or self.evaluations or self.scores or self.checkpoints)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible data."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        files = {
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "pictures": [asdict(picture) for picture in self.pictures],
        }
        return values | files | {"folder": str(self.folder), "step": self.step, "steps": self.steps}


def count_of(config: dict[str, Any], flag: str) -> int | None:
    """Return the value of a flag if it is a whole number, else None.

    Args:
        config: Flags and their values as text.
        flag: The flag without dashes.
    """
    text = str(config.get(flag, ""))
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    with suppress(PermissionError):
        return (folder / CONFIG).is_file() or (folder / METRICS).is_file()
    return False


def find(folder: Path) -> list[Path]:
    """Return a run folder itself, or the run folders below a folder, in order of start.

    Raises:
        GigamaskError: There is no run.
    """
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        raise GigamaskError(
            f"{folder}: is not a folder; give a run folder, or a folder that holds run folders"
        )
    runs = []
    for root, subfolders, _ in os.walk(folder):
        path = Path(root)
        if is_run(path):
            runs.append(path)
        if is_run(path) or len(path.relative_to(folder).parts) >= MAX_DEPTH:
            subfolders.clear()
        subfolders[:] = sorted(
            name for name in subfolders if name not in INSIDE and not name.startswith(".")
        )
    if not runs:
        raise GigamaskError(
            f"{folder}: holds no run (a folder with {CONFIG} or {METRICS}), nor do its subfolders;"
            " give a run folder"
        )
    return sorted(runs, key=_start_time)


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the shortest path suffixes that distinguish the folders.

    Raises:
        GigamaskError: A folder is given twice.
    """
    paths = [folder.absolute().parts for folder in folders]
    for i, parts in enumerate(paths):
        if parts in paths[:i]:
            raise GigamaskError(f"{folders[i]}: is given twice; give each run once")
    longest = max(map(len, paths), default=1)
    lengths = range(1, longest + 1)
    count = next((n for n in lengths if len({p[-n:] for p in paths}) == len(paths)), longest)
    return ["/".join(parts[-count:]) for parts in paths]


def read(folder: Path, verify: bool = False) -> History:
    """Read a run folder.

    Args:
        folder: The run folder.
        verify: Whether to compare the contents of all checkpoints with their crc32.

    Raises:
        GigamaskError: The folder is not a run folder.
    """
    if not is_run(folder):
        raise GigamaskError(
            f"{folder}: is not a run folder, it has no {CONFIG} and no {METRICS}; give the --out of"
            " a training"
        )
    damaged: list[str] = []
    events, invalid_lines = _read_lines(folder / METRICS, schema.MetricsEvent, damaged)
    valid, faults, starts = _resolve(events)
    return History(
        folder,
        _config(folder / CONFIG, damaged),
        _read_lines(folder / ORIGIN, schema.Start, damaged)[0],
        _columns(event for event in valid if _is_record(event)),
        [_evaluation(event) for event in valid if "evaluation" in event],
        faults,
        starts,
        _checkpoints(folder / "checkpoints", verify, damaged),
        _pictures(folder / "pictures", damaged),
        _scores(folder / SCORES, damaged),
        invalid_lines,
        damaged,
        verify,
    )


def _start_time(folder: Path) -> float:
    """Return the start time of a run: its lock is created then and never written again."""
    return min(
        (folder / name).stat().st_mtime
        for name in ("lock", CONFIG, METRICS)
        if (folder / name).exists()
    )


@contextmanager
def _noting(damaged: list[str]) -> Iterator[None]:
    """Leave out what is damaged, and note why."""
    try:
        yield
    except (GigamaskError, OSError) as error:
        damaged.append(str(error))


def _read_lines(path: Path, kind: Any, damaged: list[str]) -> tuple[Events, int]:
    """Return the objects of a JSON Lines file and the number of damaged lines.

    An unfinished last line is ignored.
    """
    content = b""
    if os.path.lexists(path):
        with _noting(damaged):
            content = read_limited(path, MAX_JSON_BYTES)
    *lines, _ = content.split(b"\n")
    objects, invalid_lines = [], 0
    for line in filter(bytes.strip, lines):
        try:
            value = decode_json(line, str(path))
            known = msgspec.convert(value, kind)
            objects.append(value if _is_record(value) else known)
        except (GigamaskError, msgspec.ValidationError):
            invalid_lines += 1
    return objects, invalid_lines


def _is_record(event: dict[str, Any]) -> bool:
    return "images_per_s" in event


def _resolve(
    events: Iterable[dict[str, Any]],
) -> tuple[Events, dict[str, Events], Events]:
    """Return the latest events of each step, the faults by kind, and the starts.

    A start at a step discards all later steps. If the step number goes back, a start was not
    recorded.
    """
    valid: Events = []
    starts: Events = []
    faults: dict[str, Events] = {kind: [] for kind in KINDS}
    last = 0
    names: set[str] = set()
    for event in events:
        step = event["step"]
        back = _is_record(event) and step <= last
        if "started" in event or back:
            start = {"step": None if back else step, "time": event.get("started")}
            starts.append(start | {"device": event.get("device")})
            faults["corrupt_checkpoints"] += [
                {"step": step, "checkpoint": name} for name in event.get("corrupt_checkpoints", ())
            ]
            if last or step or len(starts) > 1:
                faults["resumed"].append(start | {"reached": last})
            first_again = step if back else step + 1
            for earlier in (valid, *(faults[kind] for kind in REPEATED_EVENTS)):
                while earlier and earlier[-1]["step"] >= first_again:
                    names.discard(earlier.pop().get("skipped_sample", ""))
            last = first_again - 1
        if _is_record(event):
            last = step
        known = () if _is_record(event) else KINDS[2:]
        kind = next((kind for kind in known if kind in event), None)
        if kind is None:
            valid.append(event)
        elif kind != "skipped_sample" or event["skipped_sample"] not in names:
            faults[kind].append(event)
            names.add(event.get("skipped_sample", ""))
    return valid, faults, starts


def _columns(records: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return records as columns; values that are not numbers become None."""
    rows = list(records)
    names = dict.fromkeys(itertools.chain(("step",), (name for row in rows for name in row)))
    return {
        name: [number(row.get(name)) for row in rows]
        for name in itertools.islice(names, MAX_COLUMNS)
    }


def number(value: Any) -> float | int | None:
    """Return a JSON value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < schema.MAX_NUMBER else None


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    scores, errors = (
        {name: number(value) for name, value in itertools.islice(found.items(), MAX_COLUMNS)}
        for found in (event["evaluation"], event.get("standard_error", {}))
    )
    return {
        "step": event["step"],
        "scores": scores,
        "standard_error": errors,
        "of": event.get("of", ""),
        "subject": event.get("subject", ""),
        "warnings": event.get("warnings", []),
        "seconds": event.get("seconds"),
    }


def _config(path: Path, damaged: list[str]) -> dict[str, Any]:
    """Return the flags of the file as text; none if it cannot be read."""
    if os.path.lexists(path):
        with _noting(damaged):
            return flatten_yaml(read_yaml(path), str(path))
    return {}


def _scores(path: Path, damaged: list[str]) -> dict[str, Any] | None:
    """Return the scores of clicks; None if the file has none."""
    if os.path.lexists(path):
        with _noting(damaged):
            content = read_json(path)
            if isinstance(content, dict) and "clicks" not in content:
                return None
            try:
                return dict(msgspec.convert(content, schema.Scores))
            except msgspec.ValidationError as error:
                damaged.append(f"{path}: not the scores of an evaluation ({error})")
    return None


def _checkpoints(folder: Path, contents: bool, damaged: list[str]) -> list[Checkpoint]:
    """Return the checkpoints, oldest first, without those removed in the meantime."""
    best = os.path.realpath(folder / manifest.BEST)
    checkpoints = []
    paths: list[Path] = []
    with _noting(damaged):
        paths = manifest.list_checkpoints(folder)
    for path in paths:
        fields: dict[str, Any] = {}
        faults: list[str] = []
        with _noting(faults):
            read_json(path / manifest.MANIFEST)  # refuses pipes and deep nesting
            fields = manifest.verify(path, contents)
        try:
            size = sum(file.lstat().st_size for file in path.iterdir())
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(
                timespec="seconds"
            )
        except FileNotFoundError:
            continue
        except (OSError, ValueError, OverflowError) as error:
            damaged.append(f"{path}: not a checkpoint ({error})")
            continue
        by = fields.get("scored_by")
        checkpoints.append(
            Checkpoint(
                path.name,
                manifest.step_of(path) or 0,
                count_of(fields, "samples"),
                size,
                written,
                number(fields.get("score")),
                by if isinstance(by, str) else None,
                os.path.realpath(path) == best,
                faults[0] if faults else None,
            )
        )
    return checkpoints


def _pictures(folder: Path, damaged: list[str]) -> list[Picture]:
    """Return pictures made in training by step, then the others by name.

    A symbolic link could show a file outside the run, so it is left out.
    """
    pictures = []
    for path in folder.glob("*"):
        if path.suffix not in (".png", ".jpg"):
            continue
        if folder.is_symlink() or path.is_symlink() or not path.is_file():
            damaged.append(f"{path}: not a regular file")
            continue
        pictures.append(Picture(str(path), path.stem, manifest.step_of(path.with_suffix(""))))
    return sorted(pictures, key=lambda one: (one.step is None, one.step or 0, one.name))
