"""What a run's folder tells of the run: its configuration, what was recorded at which step, evaluations, faults, checkpoints, pictures.

Enters: a folder of `gigamask train`, `pretrain` or `ground train`, finished or still written to. Leaves: plain data. A line that was cut short is
passed over, a file that is missing leaves its part empty, and what was trained twice, because a training was killed and went on from its last
checkpoint, counts as it was trained last. Imports no torch: a run is read while it trains, again and again.

Not here: how it is shown (`report.page`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
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
"""Folders of a run that hold no other run."""
DEPTH = 4
"""Folders below the one that is named in which runs are looked for."""
LARGEST = 1e300
"""Larger numbers, infinity and NaN count as unknown."""
TRAINED_AGAIN = ("rejected", "skipped")
"""Events that show again when a step is trained again."""
KINDS = ("resumed", "damaged", "rejected", "skipped", "unsaved", "leak")
"""Of faults: trainings that went on, checkpoints passed over, samples left out, steps that changed nothing, saves that failed, memory that grows."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: what its manifest says, whether `best` links to it, and why it is not sound, None where it is as far as it was looked at."""

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
    """One picture file of a run; `step` where it was made during training."""

    path: str
    name: str
    step: int | None


@dataclass(frozen=True)
class History:
    """A run as its folder tells it; all but `folder` is what JSON knows.

    `config`: flags and their values as text. `origin`: who began it, one entry each time. `records`: columns by name, all as long as `step`, None
    where a step has no such number. `evaluations`: each with `step`, `scores`, `worries`, `seconds`. `faults`: lists of events by the names of
    `KINDS`, each with `step`. `begun`: each time training began, with `step`, `time` and `device`. `scores`: of evaluation.json. `torn`: lines
    that cannot be read. `verified`: whether the contents of checkpoints were read, else their manifests and sizes alone.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    origin: list[dict[str, Any]] = field(default_factory=list)
    records: dict[str, list[Any]] = field(default_factory=lambda: {"step": []})
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    begun: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    scores: dict[str, Any] | None = None
    torn: int = 0
    verified: bool = False

    @property
    def step(self) -> int:
        """The last step that is recorded, 0 before the first."""
        return max(
            [0, *self.records["step"][-1:], *(each["step"] for each in self.evaluations[-1:])]
        )

    @property
    def steps(self) -> int | None:
        """The steps it is meant to take."""
        return int(told) if (told := str(self.config.get("steps", ""))).isdigit() else None

    @property
    def empty(self) -> bool:
        """Whether there is nothing of it to show yet."""
        return not (self.records["step"] or self.evaluations or self.scores or self.checkpoints)

    def plain(self) -> dict[str, Any]:
        """Returns all of it as data that JSON knows."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        files = {
            "checkpoints": [asdict(each) for each in self.checkpoints],
            "pictures": [asdict(each) for each in self.pictures],
        }
        return held | files | {"folder": str(self.folder), "step": self.step, "steps": self.steps}


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / CONFIG).is_file() or (folder / METRICS).is_file()


def find(folder: Path) -> list[Path]:
    """Returns the run folders that a folder means: itself, or those below, such as stages and ablations, in the order in which they were begun.

    Raises `GigamaskError` where there is none.
    """
    if is_run(folder):
        return [folder]
    if not folder.is_dir():
        raise GigamaskError(
            f"{folder}: no such folder; name the folder of a run, or one that holds some"
        )
    found = []
    for at, below, _ in os.walk(folder):
        if is_run(Path(at)):
            found.append(Path(at))
        deep = len(Path(at).relative_to(folder).parts) >= DEPTH
        below[:] = (
            []
            if deep or is_run(Path(at))
            else sorted(name for name in below if name not in INSIDE and not name.startswith("."))
        )
    if not found:
        raise GigamaskError(
            f"{folder}: neither it nor a folder in it holds a {CONFIG} or a {METRICS}, so there is no run; name a run's folder"
        )
    return sorted(found, key=_begun_s)


def labels(folders: Sequence[Path]) -> list[str]:
    """Returns a short name for each of some folders, the last parts of its path that tell it from the others; raises `GigamaskError` for one named twice."""
    whole = [folder.absolute().parts for folder in folders]
    for place, parts in enumerate(whole):
        if parts in whole[:place]:
            raise GigamaskError(f"{folders[place]}: is named twice; name each run once")
    most = max(map(len, whole), default=1)
    count = next(
        (n for n in range(1, most + 1) if len({parts[-n:] for parts in whole}) == len(whole)), most
    )
    return ["/".join(parts[-count:]) for parts in whole]


def read(folder: Path, verify: bool = False) -> History:
    """Returns what a run folder tells; with `verify` the contents of its checkpoints are held against their crc32, which reads all of them.

    Raises `GigamaskError` for a folder that is no run's.
    """
    if not is_run(folder):
        raise GigamaskError(
            f"{folder}: holds no {CONFIG} and no {METRICS}, so it is no run's folder; name one that a training wrote to"
        )
    events, torn = _lines(folder / METRICS)
    kept, faults, begun = _resolved(events)
    return History(
        folder,
        _config(folder / CONFIG),
        _lines(folder / ORIGIN)[0],
        _columns(each for each in kept if _is_record(each)),
        [_evaluation(each) for each in kept if "evaluation" in each],
        faults,
        begun,
        _checkpoints(folder / "checkpoints", verify),
        _pictures(folder / "pictures"),
        _scores(folder / SCORES),
        torn,
        verify,
    )


def _begun_s(folder: Path) -> float:
    """Returns when a run was begun: its lock is made then and never written again."""
    return min(
        (folder / name).stat().st_mtime
        for name in ("lock", CONFIG, METRICS)
        if (folder / name).exists()
    )


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file, one a line, and how many of its lines are none; a last one that is being written counts as neither."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    *lines, _ = whole.split(b"\n")
    decode, found, torn = msgspec.json.Decoder().decode, [], 0
    for line in lines:
        try:
            told = decode(line)
        except msgspec.DecodeError:  # Python writes numbers that are none as NaN, which is no JSON
            try:
                told = json.loads(line)
            except ValueError:
                told = None
        if isinstance(told, dict):
            found.append(told)
        elif line.strip():
            torn += 1
    return found, torn


def _is_record(event: dict[str, Any]) -> bool:
    return "images_per_s" in event


def _resolved(
    events: Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Returns the events of what was trained last at each step, faults by kind, and the beginnings.

    A training that begins at a step undoes those behind it; where no beginning is written down, steps that go back tell of one.
    """
    kept: list[dict[str, Any]] = []
    begun: list[dict[str, Any]] = []
    faults: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    last = 0
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        back = _is_record(event) and step <= last
        if "begun" in event or back:
            if back:
                begun.append({"step": None, "time": None, "device": None})
            else:
                begun.append({"step": step, "time": event["begun"], "device": event.get("device")})
                faults["damaged"] += [
                    {"step": step, "checkpoint": name} for name in event.get("damaged", ())
                ]
            if last or step or len(begun) > 1:
                faults["resumed"].append(
                    {"step": begun[-1]["step"], "time": begun[-1]["time"], "reached": last}
                )
            first_again = step if back else step + 1
            kept = [each for each in kept if each["step"] < first_again]
            for kind in TRAINED_AGAIN:
                faults[kind] = [each for each in faults[kind] if each["step"] < first_again]
            last = first_again - 1
        if _is_record(event):
            last = step
        kind = next(
            (
                kind
                for kind in ("rejected", "skipped", "unsaved", "leak")
                if kind in event and not _is_record(event)
            ),
            None,
        )
        if kind is None:
            kept.append(event)
        elif kind != "rejected" or event["rejected"] not in [
            each["rejected"] for each in faults["rejected"]
        ]:
            faults[kind].append(event)
    return kept, faults, begun


def _columns(records: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Returns records as columns; what is no number is None."""
    rows = list(records)
    names = dict.fromkeys(name for row in rows for name in row)
    return {"step": []} | {name: [number(row.get(name)) for row in rows] for name in names}


def number(value: Any) -> float | int | None:
    """Returns a value of JSON if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < LARGEST else None


def _evaluation(event: dict[str, Any]) -> dict[str, Any]:
    scores = {name: number(value) for name, value in event["evaluation"].items()}
    return {
        "step": event["step"],
        "scores": scores,
        "worries": [str(each) for each in event.get("worries", ())],
        "seconds": number(event.get("seconds")),
    }


def _config(path: Path) -> dict[str, Any]:
    """Returns flags as text, as they stand in the file; nothing where it cannot be read."""
    try:
        told = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return told if isinstance(told, dict) else {}


def _scores(path: Path) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and "clicks" in told else None


def _checkpoints(folder: Path, contents: bool) -> list[Checkpoint]:
    """Returns the checkpoints, oldest first; one that is removed meanwhile is left out."""
    best = os.path.realpath(folder / manifest.BEST)
    found = []
    for path in manifest.list_checkpoints(folder):
        try:
            told, fault = manifest.verify(path, contents), None
        except GigamaskError as damaged:
            told, fault = {}, str(damaged)
        try:
            size = sum(each.stat().st_size for each in path.iterdir())
            written = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(
                timespec="seconds"
            )
        except FileNotFoundError:
            continue
        step = (
            int(path.name.removeprefix("step_")) if path.name.removeprefix("step_").isdigit() else 0
        )
        score = number(told.get("score"))
        found.append(
            Checkpoint(
                path.name,
                step,
                told.get("samples"),
                size,
                written,
                score,
                told.get("scored_by"),
                os.path.realpath(path) == best,
                fault,
            )
        )
    return found


def _pictures(folder: Path) -> list[Picture]:
    """Returns pictures made during training in the order of their steps, then the others by name."""
    return sorted(
        _each_picture(folder), key=lambda each: (each.step is None, each.step or 0, each.name)
    )


def _each_picture(folder: Path) -> Iterator[Picture]:
    for path in folder.glob("*"):
        if path.suffix in (".png", ".jpg"):
            made = path.stem.removeprefix("step_")
            yield Picture(
                str(path), path.stem, int(made) if made != path.stem and made.isdigit() else None
            )
