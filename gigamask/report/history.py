"""Read run folders: configuration, metrics, evaluations, faults, checkpoints and pictures.

The run may still be training. Truncated lines are skipped, and missing files leave their part
empty. If steps were trained twice, after a restart from a checkpoint, the later records count.
This module does not import torch, since a run is read repeatedly while it trains.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gigamask.errors import GigamaskError
from gigamask.training import manifest

CONFIG, METRICS, ORIGIN, SCORES = "config.yaml", "metrics.jsonl", "origin.jsonl", "evaluation.json"
INSIDE = ("checkpoints", "evaluation", "tensorboard", "pictures", "profile", "features")
"""Subfolders of a run that hold no other run."""
MAX_DEPTH = 4
"""Levels of subfolders that are searched for runs."""
MAX_NUMBER = 1e300
"""Larger numbers, infinity and NaN count as unknown."""
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
        evaluations: Evaluations in training, each with `step`, `scores`, `warnings`, `seconds`.
        faults: Events by kind (`KINDS`), each with `step`.
        starts: Starts of training, each with `step`, `time` and `device`.
        checkpoints: The checkpoints, oldest first.
        pictures: Pictures made in training by step, then the others by name.
        scores: The contents of evaluation.json.
        invalid_lines: Number of unreadable lines of metrics.jsonl.
        verified: Whether checkpoint contents were verified, not only their manifests and sizes.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    origin: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, list[Any]] = field(default_factory=lambda: {"step": []})
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    starts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    scores: dict[str, Any] | None = None
    invalid_lines: int = 0
    verified: bool = False

    @property
    def step(self) -> int:
        """The last recorded step, 0 before the first."""
        evaluated = [evaluation["step"] for evaluation in self.evaluations[-1:]]
        return max([0, *self.records["step"][-1:], *evaluated])

    @property
    def steps(self) -> int | None:
        """The configured number of steps."""
        return int(steps) if (steps := str(self.config.get("steps", ""))).isdigit() else None

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


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def find(folder: Path) -> list[Path]:
    """Return a run folder itself, or the run folders below a folder, in order of start.

    Raises:
        GigamaskError: There is no run.
    """
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        raise GigamaskError(
            f"{folder}: no such folder; give a run folder, or a folder that holds run folders"
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
    events, invalid_lines = _read_lines(folder / METRICS)
    valid, faults, starts = _resolve(events)
    return History(
        folder,
        _config(folder / CONFIG),
        _read_lines(folder / ORIGIN)[0],
        _columns(event for event in valid if _is_record(event)),
        [_evaluation(event) for event in valid if "evaluation" in event],
        faults,
        starts,
        _checkpoints(folder / "checkpoints", verify),
        _pictures(folder / "pictures"),
        _scores(folder / SCORES),
        invalid_lines,
        verify,
    )


def _start_time(folder: Path) -> float:
    """Return the start time of a run: its lock is created then and never written again."""
    return min(
        (folder / name).stat().st_mtime
        for name in ("lock", CONFIG, METRICS)
        if (folder / name).exists()
    )


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON Lines file and the number of invalid lines.

    An unfinished last line is ignored.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    *lines, _ = content.split(b"\n")
    decode, objects, invalid_lines = msgspec.json.Decoder().decode, [], 0
    for line in lines:
        try:
            value = decode(line)
        except msgspec.DecodeError:  # Python writes NaN, which is not valid JSON
            try:
                value = json.loads(line)
            except ValueError:
                value = None
        if isinstance(value, dict):
            objects.append(value)
        elif line.strip():
            invalid_lines += 1
    return objects, invalid_lines


def _is_record(event: dict[str, Any]) -> bool:
    return "images_per_s" in event


def _resolve(
    events: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return the latest events of each step, the faults by kind, and the starts.

    A start at a step discards all later steps. If the step number goes back, a start was not
    recorded.
    """
    valid: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    faults: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    last = 0
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        back = _is_record(event) and step <= last
        if "started" in event or back:
            if back:
                starts.append({"step": None, "time": None, "device": None})
            else:
                starts.append(
                    {"step": step, "time": event["started"], "device": event.get("device")}
                )
                faults["corrupt_checkpoints"] += [
                    {"step": step, "checkpoint": name}
                    for name in event.get("corrupt_checkpoints", ())
                ]
            if last or step or len(starts) > 1:
                faults["resumed"].append(
                    {"step": starts[-1]["step"], "time": starts[-1]["time"], "reached": last}
                )
            first_again = step if back else step + 1
            valid = [earlier for earlier in valid if earlier["step"] < first_again]
            for kind in REPEATED_EVENTS:
                faults[kind] = [fault for fault in faults[kind] if fault["step"] < first_again]
            last = first_again - 1
        if _is_record(event):
            last = step
        kind = next(
            (
                kind
                for kind in ("skipped_sample", "skipped_step", "save_failed", "leak")
                if kind in event and not _is_record(event)
            ),
            None,
        )
        if kind is None:
            valid.append(event)
        elif kind != "skipped_sample" or event["skipped_sample"] not in [
            fault["skipped_sample"] for fault in faults["skipped_sample"]
        ]:
            faults[kind].append(event)
    return valid, faults, starts


def _columns(records: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return records as columns; values that are not numbers become None."""
    rows = list(records)
    names = dict.fromkeys(name for row in rows for name in row)
    return {"step": []} | {name: [number(row.get(name)) for row in rows] for name in names}


def number(value: Any) -> float | int | None:
    """Return a JSON value if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < MAX_NUMBER else None


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    scores = {name: number(value) for name, value in event["evaluation"].items()}
    return {
        "step": event["step"],
        "scores": scores,
        "warnings": [str(warning) for warning in event.get("warnings", ())],
        "seconds": number(event.get("seconds")),
    }


def _config(path: Path) -> dict[str, Any]:
    """Return the flags of the file as text; none if it cannot be read."""
    try:
        config = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _scores(path: Path) -> dict[str, Any] | None:
    try:
        scores = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return scores if isinstance(scores, dict) and "clicks" in scores else None


def _checkpoints(folder: Path, contents: bool) -> list[Checkpoint]:
    """Return the checkpoints, oldest first, without those removed in the meantime."""
    best = os.path.realpath(folder / manifest.BEST)
    checkpoints = []
    for path in manifest.list_checkpoints(folder):
        try:
            fields, fault = manifest.verify(path, contents), None
        except GigamaskError as error:
            fields, fault = {}, str(error)
        try:
            size = sum(file.stat().st_size for file in path.iterdir())
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(
                timespec="seconds"
            )
        except FileNotFoundError:
            continue
        step = (
            int(path.name.removeprefix("step_")) if path.name.removeprefix("step_").isdigit() else 0
        )
        checkpoints.append(
            Checkpoint(
                path.name,
                step,
                fields.get("samples"),
                size,
                written,
                number(fields.get("score")),
                fields.get("scored_by"),
                os.path.realpath(path) == best,
                fault,
            )
        )
    return checkpoints


def _pictures(folder: Path) -> list[Picture]:
    """Return pictures made in training by step, then the others by name."""
    pictures = []
    for path in folder.glob("*"):
        if path.suffix in (".png", ".jpg"):
            step = path.stem.removeprefix("step_")
            is_step = step != path.stem and step.isdigit()
            pictures.append(Picture(str(path), path.stem, int(step) if is_step else None))
    return sorted(pictures, key=lambda one: (one.step is None, one.step or 0, one.name))
