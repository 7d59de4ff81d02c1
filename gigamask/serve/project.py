"""An annotation project: a folder with the objects of each image and how they were made.

`project.json` has the version of the format, the folder of the images, the categories and the
rounds of training. `annotations/NAME.json` has the edits of one image, from which its objects
follow: so every edit can be undone, and what each mask cost is known. Every change is written at
once and atomically. It must name the version of the image that it was made for, so that a stale
page cannot overwrite another's work.
"""

import math
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from gigamask import files
from gigamask.data import image_folder
from gigamask.data.file_lock import exclusive_lock, folder_lock
from gigamask.errors import GigamaskError
from gigamask.pixels import WindowOptions
from gigamask.serialization import read_json
from gigamask.serve.open_images import NotFoundError
from gigamask.serve.photographs import (
    FileContent,
    annotations_of,
    content_of,
    missing_names,
    stamp_of,
    utf8_name,
)
from gigamask.serve.prompt_steps import PromptStep

VERSION = 1
PROJECT = "project.json"
MAX_FILE_BYTES = 2**24
"""Limit of one image's edits; beyond it, the older half becomes one edit."""
HELD_OUT_OF = 10
"""One image of this number is held out."""
LEAST_MASKS, LEAST_IMAGES = 20, 5
"""Fewer held-out masks, or of fewer images, do not tell which model is better."""
IDLE_S = 30.0
"""A longer pause between two edits counts as this long."""
WORK = ("prompt", "stroke", "polygon", "split")
"""Kinds of edits that count as a click."""
MACHINE = ("propose", "accept all")
"""Kinds of edits that take no time of the annotator."""


Origin = Literal["drawn", "clicked", "corrected", "proposed", "accepted", "accepted in bulk"]
"""How a mask came: by hand; from a person's clicks; as a proposal that a person changed; as one
that nobody has accepted; that a person looked at and accepted; that was accepted unseen."""
UNEDITED = ("proposed", "accepted", "accepted in bulk")
"""Origins of masks that are a model's own answers, which do not count as truth."""


class StaleError(GigamaskError):
    """Raised if a change was made for another version of an image's annotations."""


@dataclass(frozen=True)
class MaskObject:
    """An object of an image.

    Attributes:
        mask: Its mask, as COCO's compressed counts.
        name: Its own name, may be empty.
        category: Name of its category.
        accepted: Whether it is finished; only accepted objects are exported and trained on.
        by_model: Whether the model proposed it.
        base: Mask that `steps` continue from, if it was drawn or proposed; COCO's counts.
        steps: Prompts since then.
        predicted_iou: IoU that the model predicts, if it made the mask.
        stability: Stability score, likewise.
        origin: How it came; "" in files of earlier versions.
        model: The model that made it or answered its clicks, as `ProjectFile.model`; None if none
            did.
    """

    mask: str
    name: str = ""
    category: str = "object"
    accepted: bool = False
    by_model: bool = False
    base: str | None = None
    steps: tuple[PromptStep, ...] = ()
    predicted_iou: float | None = None
    stability: float | None = None
    origin: Origin | Literal[""] = ""
    model: int | None = None

    @property
    def came(self) -> Origin:
        """How the mask came, also for files of earlier versions."""
        if self.origin:
            return self.origin
        if not self.by_model:
            return "drawn"
        return "accepted in bulk" if self.accepted else "proposed"

    @property
    def is_truth(self) -> bool:
        """Whether it is accepted and a person made or changed it, so that models can be compared
        with it."""
        return self.accepted and self.came not in UNEDITED

    @property
    def certainty(self) -> float:
        """The mean of predicted IoU and stability, 0 if unknown."""
        return max(((self.predicted_iou or 0.0) + (self.stability or 0.0)) / 2, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether it is a proposal that nobody has accepted."""
        return self.by_model and not self.accepted


Objects = dict[int, MaskObject]


@dataclass
class MaskCost:
    """Clicks and seconds while a model was in use, and the masks accepted then, by origin."""

    clicks: int = 0
    seconds: float = 0.0
    origins: Counter[Origin] = field(default_factory=Counter)

    def add(self, other: "MaskCost") -> None:
        """Add what other masks cost."""
        self.clicks += other.clicks
        self.seconds += other.seconds
        self.origins += other.origins


@dataclass(frozen=True)
class Edit:
    """What an edit changed: objects by id, None if deleted; its time and the number of the round
    whose model was in use, 0 for the first model."""

    kind: str
    changes: dict[int, MaskObject | None]
    time: float = 0.0
    round: int = 0


@dataclass(frozen=True)
class ImageEdits:
    """All edits of one image.

    Attributes:
        size: (H, W) of the image.
        version: Increases with every change.
        edits: The edits, oldest first.
        applied: How many of them are applied; the others were undone.
        done: Whether the annotator is finished with the image.
        held_out: Whether it is used to compare models, and never trained on.
        proposed_by: Index of the round whose model proposed masks, as `ProjectFile.model`.
        content: Content of the image file at the first edit, by which it is found if renamed.
    """

    size: tuple[int, int]
    version: int = 0
    edits: tuple[Edit, ...] = ()
    applied: int = 0
    done: bool = False
    held_out: bool = False
    proposed_by: int | None = None
    content: FileContent | None = None

    @property
    def objects(self) -> Objects:
        """The objects by id, after the applied edits."""
        found: Objects = {}
        for edit in self.edits[: self.applied]:
            for key, changed in edit.changes.items():
                found.pop(key, None) if changed is None else found.update({key: changed})
        return dict(sorted(found.items()))

    @property
    def next_id(self) -> int:
        """An id that no object has had."""
        return 1 + max((key for edit in self.edits for key in edit.changes), default=0)

    @property
    def status(self) -> Literal["not begun", "proposed", "in progress", "done"]:
        """How far the image is annotated."""
        if self.done:
            return "done"
        kinds = {edit.kind for edit in self.edits[: self.applied]}
        if not kinds:
            return "not begun"
        return "proposed" if kinds <= set(MACHINE) else "in progress"

    def with_edit(self, edit: Edit) -> "ImageEdits":
        """Return the edits with one more; those that were undone are dropped."""
        edits = (*self.edits[: self.applied], edit)
        return replace(self, edits=edits, applied=len(edits))

    def moved(self, by: int) -> "ImageEdits":
        """Return the edits with more of them applied, or fewer if `by` is negative."""
        applied = self.applied + by
        if not 0 <= applied <= len(self.edits):
            raise GigamaskError(f"there is nothing to {'undo' if by < 0 else 'redo'}")
        return replace(self, applied=applied)

    def costs(self) -> "dict[int, MaskCost]":
        """Return what the accepted masks cost by the model that was in use, 0 for the first."""
        found: dict[int, MaskCost] = defaultdict(MaskCost)
        last_s, accepted_in = None, dict[int, int]()
        for edit in self.edits[: self.applied]:
            gap_s = 0.0 if last_s is None else min(max(edit.time - last_s, 0.0), IDLE_S)
            found[edit.round].clicks += edit.kind in WORK
            found[edit.round].seconds += 0.0 if edit.kind in MACHINE else gap_s
            last_s = edit.time
            for key, changed in edit.changes.items():
                if changed is None or not changed.accepted:
                    accepted_in.pop(key, None)
                else:
                    accepted_in.setdefault(key, edit.round)
        for key, each in self.objects.items():
            if each.accepted:
                found[accepted_in[key]].origins[each.came] += 1
        return dict(found)

    def merged(self) -> "ImageEdits":
        """Return the same objects with the older half of the edits merged into one."""
        half = self.applied // 2
        objects = replace(self, applied=half).objects
        first = Edit("merge", dict(objects), self.edits[half - 1].time, self.edits[half - 1].round)
        edits = (first, *self.edits[half:])
        return replace(self, edits=edits, applied=self.applied - half + 1)


@dataclass(frozen=True)
class ObjectCategory:
    """A category of objects and its color, as #rrggbb."""

    name: str
    color: str


@dataclass(frozen=True)
class TrainingRound:
    """A finished training: clicks to 90 % IoU on the held-out images before and after.

    Attributes:
        weights: The new model.
        before: Mean clicks of the model before.
        after: Mean clicks of the new one.
        held_out_masks: Number of masks.
        class_accuracy: That of the new model after one click; None if it has no classes.
        held_out_images: Number of images of these masks.
        standard_error: That of `before - after`; the masks of an image count as one draw. None if
            all are of one image.
    """

    weights: str
    before: float
    after: float
    held_out_masks: int = 0
    class_accuracy: float | None = None
    held_out_images: int = 0
    standard_error: float | None = None

    @property
    def verdict(self) -> Literal["too few to tell", "better", "worse", "no difference"]:
        """What can be said of the new model: a difference is above two standard errors."""
        few = self.held_out_masks < LEAST_MASKS or self.held_out_images < LEAST_IMAGES
        if few or self.standard_error is None:
            return "too few to tell"
        gain = self.before - self.after
        if abs(gain) <= 2 * self.standard_error:
            return "no difference"
        return "better" if gain > 0 else "worse"


@dataclass(frozen=True)
class ProjectFile:
    """The content of project.json.

    Attributes:
        images: The folder of the images.
        categories: The categories.
        rounds: The trainings so far.
        model: Index of the round whose model is in use; -1 is the one that the project began with.
        pixels: How images of more than 8 bits are read by models that state no window.
    """

    images: str
    version: int = VERSION
    categories: tuple[ObjectCategory, ...] = (ObjectCategory("object", "#0072b2"),)
    rounds: tuple[TrainingRound, ...] = ()
    model: int = -1
    pixels: WindowOptions = field(default_factory=WindowOptions)


@dataclass(frozen=True)
class _Version:
    version: int = 0


@dataclass(frozen=True)
class ImageSummary:
    """What is known of an image without reading its annotations.

    Attributes:
        listed: What the list says, as `Project.summary`.
        costs: What its masks cost, by model.
        stamp: That of the file of annotations (`photographs.stamp_of`).
    """

    listed: dict[str, Any]
    costs: dict[int, MaskCost] = field(default_factory=dict)
    stamp: tuple[int, ...] | None = None


@dataclass
class Summaries:
    """The summary of each image by row, and after which change it last changed.

    Attributes:
        rows: The summaries.
        changes: Number of the last change; it begins with the time, so that it also increases
            over restarts.
        changed: Number of the last change of each row.
    """

    rows: dict[int, ImageSummary] = field(default_factory=dict)
    changes: int = field(default_factory=lambda: time.time_ns() // 1000)
    changed: dict[int, int] = field(default_factory=dict)

    def put(self, row: int, summary: ImageSummary) -> None:
        """Set the summary of an image.

        Args:
            row: Its row.
            summary: The summary.
        """
        self.changes += 1
        self.rows[row], self.changed[row] = summary, self.changes

    def since(self, change: int) -> list[int]:
        """Return the rows that changed after a change."""
        return sorted(row for row, number in self.changed.items() if number > change)


@dataclass
class Project:
    """A project folder; thread-safe. Images are numbered by row, in order of their names.

    Attributes:
        folder: The project folder.
        content: The content of project.json.
        names: Paths of the images within their folder.
        missing: The accepted masks of each annotated image that is not in the folder, None if they
            cannot be read; `serve.lost_images` pairs them.
        stopping: Set when the server stops; an export ends then.
        lock: Held while anything is changed.
        summaries: What the list says of each image.
    """

    folder: Path
    content: ProjectFile
    names: list[str]
    missing: dict[str, int | None] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    lock: Any = field(default_factory=threading.RLock, repr=False)
    summaries: Summaries = field(default_factory=Summaries, repr=False)

    @classmethod
    @contextmanager
    def open(cls, folder: Path | str, images: Path | str | None = None) -> Iterator["Project"]:
        """Open a project, or begin one, and keep others out meanwhile.

        Args:
            folder: The project folder.
            images: The folder of the images, in subfolders or not; required for a new project, and
                for another it says where they are now.

        Raises:
            GigamaskError: The project is of another version, in use, or cannot be written, or the
                images are missing.
        """
        folder = Path(folder)
        path = folder / PROJECT
        content = _read(path) if path.exists() else None
        if images is None and content is None:
            raise GigamaskError(
                f"--project {folder}: is no project yet; give the folder of its images with "
                "--images"
            )
        root = os.path.abspath(images if images is not None else str(content and content.images))
        if not os.path.isdir(root):
            raise GigamaskError(f"--images {root}: no such folder; give the one of the images")
        names = sorted(
            os.path.relpath(os.path.join(found, name), root)
            for found in image_folder.find_folders(root)
            for name in image_folder.scan(found).names
        )
        missing = {
            name: _count_accepted(folder, name) for name in missing_names(folder, root, names)
        }
        busy = f"--project {folder}: is open in another gigamask serve; stop that first"
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive_lock(folder / ".lock", busy))
                stack.enter_context(folder_lock(folder, busy))
            except OSError as error:
                raise GigamaskError(
                    f"--project {folder}: cannot be written ({error.strerror}); give another folder"
                ) from None
            opened = cls(folder, content or ProjectFile(root), names, missing)
            if content is None or content.images != root:
                opened.update(images=root)
            yield opened

    def summary(self) -> list[dict[str, Any]]:
        """Return the name, status, counts and open certainties of each image, by row."""
        with self.lock:
            return [_summary_of(self, row).listed for row in range(len(self.names))]

    def read(self, row: int, size: tuple[int, int] | None = None) -> ImageEdits:
        """Return the edits of an image.

        Args:
            row: Its row.
            size: Its (H, W), which must be the one it was annotated with.

        Raises:
            GigamaskError: The file is damaged, or the image has changed its size.
        """
        self.path_of(row)
        path = annotations_of(self.folder, self.names[row])
        if not path.exists():
            return ImageEdits(size or (0, 0))
        found = read_edits(path)
        if size is not None and found.size != size:
            raise GigamaskError(
                f"{self.names[row]}: has {size[0]} x {size[1]} pixels, but was annotated with "
                f"{found.size[0]} x {found.size[1]}; put the former image back"
            )
        return found

    def change(
        self,
        row: int,
        version: int,
        change: Callable[[ImageEdits], ImageEdits],
        size: tuple[int, int] | None = None,
    ) -> ImageEdits:
        """Change the edits of an image and save them.

        Args:
            row: Row of the image.
            version: The version that the change was made for.
            change: Returns the changed edits.
            size: (H, W) of the image; required for its first edit.

        Returns:
            The saved edits, with the next version.

        Raises:
            StaleError: The image has another version by now; nothing is saved.
            GigamaskError: It cannot be saved.
        """
        with self.lock:
            found = self.read(row, size)
            if found.version != version:
                raise StaleError(
                    f"{self.names[row]}: was changed elsewhere since this page showed it, so this "
                    "change is not saved; load the image again"
                )
            content = found.content or content_of(self.path_of(row))
            changed = replace(change(found), version=version + 1, content=content)
            raw = msgspec.json.encode(changed)
            if len(raw) > MAX_FILE_BYTES and changed.applied > 1:
                changed = changed.merged()
                raw = msgspec.json.encode(changed)
            path = annotations_of(self.folder, self.names[row])
            _write(path, raw)
            self.summaries.put(row, _summarize(self.names[row], changed, stamp_of(path)))
            return changed

    def edit(
        self, row: int, version: int, edit: Edit, size: tuple[int, int] | None = None
    ) -> ImageEdits:
        """Add an edit to an image and save it; edits that were undone are dropped.

        Args:
            row: Row of the image.
            version: The version that the edit was made for.
            edit: The edit; its time and round are set here.
            size: (H, W) of the image; required for its first edit.
        """
        stamped = self.stamped(edit)
        return self.change(row, version, lambda found: found.with_edit(stamped), size)

    def stamped(self, edit: Edit) -> Edit:
        """Return an edit with the time and the model in use."""
        return replace(edit, time=time.time(), round=self.content.model + 1)

    def mark_done(self, row: int, version: int, done: bool, size: tuple[int, int]) -> ImageEdits:
        """Mark an image as done or not; one of ten done by hand is held out for good.

        Args:
            row: Row of the image.
            version: The version that was seen.
            done: Whether it is done.
            size: (H, W) of the image.
        """
        with self.lock:
            finished = [each for each in self.summary() if each["status"] == "done"]
            held_out = sum(each["held_out"] for each in finished)
            wanted = math.ceil((len(finished) + 1) / HELD_OUT_OF) > held_out

            def mark(found: ImageEdits) -> ImageEdits:
                has_truth = any(each.is_truth for each in found.objects.values())
                return replace(
                    found, done=done, held_out=found.held_out or (done and has_truth and wanted)
                )

            return self.change(row, version, mark, size)

    def update(self, **changes: Any) -> None:
        """Change fields of project.json and save it.

        Args:
            **changes: The fields and their values.
        """
        with self.lock:
            changed = replace(self.content, **changes)
            _write(self.folder / PROJECT, msgspec.json.format(msgspec.json.encode(changed)))
            self.content = changed

    def keep_window(self, given: WindowOptions) -> str | None:
        """Keep a window for later starts.

        Args:
            given: The window; if none is given, the one that is kept stays.

        Returns:
            A line that says so if another was kept, else None.
        """
        kept = self.content.pixels.flags
        if not given.flags or given.flags == kept:
            return None
        self.update(pixels=given)
        if not kept:
            return None
        return (
            f"{given.flags} replaces {kept}, which --project {self.folder} was annotated with; "
            "models that it trained keep the window of their training"
        )

    def path_of(self, row: int) -> Path:
        """Return the file of an image; raise `NotFoundError` if there is no such row."""
        if not 0 <= row < len(self.names):
            raise NotFoundError(f"there is no image {row}; there are {len(self.names)}")
        return Path(self.content.images, self.names[row])


def read_edits(path: Path) -> ImageEdits:
    """Return the edits in a file; raise `GigamaskError` if it is damaged or not there."""
    return read_json(path, ImageEdits, 4 * MAX_FILE_BYTES)


def _count_accepted(folder: Path, name: str) -> int | None:
    try:
        objects = read_edits(annotations_of(folder, name)).objects
    except GigamaskError:
        return None
    return sum(each.accepted for each in objects.values())


def _read(path: Path) -> ProjectFile:
    """Return the content of project.json; raise `GigamaskError` if it is of another version."""
    version = read_json(path, _Version).version
    if version != VERSION:
        raise GigamaskError(
            f"{path}: is of version {version}, but this gigamask reads version {VERSION}; open it "
            "with the gigamask that wrote it"
        )
    return read_json(path, ProjectFile)


def _write(path: Path, raw: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, raw)
    except OSError as error:
        raise GigamaskError(
            f"{path}: cannot be saved ({error.strerror}), so the last change is lost; free space "
            "or correct the permissions, and repeat it"
        ) from None


def progress(project: Project) -> list[dict[str, Any]]:
    """Return what masks cost with each model: `round` is 0 for the first.

    Returns:
        Of each model, the clicks and seconds while it was in use, the masks that a person made or
        looked at, and those of each origin.
    """
    totals = [MaskCost() for _ in range(len(project.content.rounds) + 1)]
    with project.lock:
        for row, each in enumerate(project.summary()):
            if each["objects"]:
                for number, cost in _fresh_costs(project, row).items():
                    totals[min(number, len(totals) - 1)].add(cost)
    return [
        {"round": number, "masks": sum(total.origins.values()) - total.origins["accepted in bulk"]}
        | vars(total)
        for number, total in enumerate(totals)
    ]


def read_usable(project: Project, row: int) -> ImageEdits | None:
    """Return the edits of an image; None if they cannot be read any more, which the list then says.

    Args:
        project: The project.
        row: Row of the image.
    """
    path = annotations_of(project.folder, project.names[row])
    with project.lock:
        before, stamp = _summary_of(project, row), stamp_of(path)
        try:
            if before.stamp and not stamp:
                raise GigamaskError(f"{path}: was deleted while the page was open")
            edits = project.read(row)
        except GigamaskError as error:
            if before.listed["status"] != "damaged":
                project.summaries.put(row, _damaged(project.names[row], error, stamp))
            return None
        if stamp != before.stamp:
            project.summaries.put(row, _summarize(project.names[row], edits, stamp))
        return edits


def _fresh_costs(project: Project, row: int) -> dict[int, MaskCost]:
    """Return what the masks of an image cost, which is read again if its file was changed."""
    stamp = stamp_of(annotations_of(project.folder, project.names[row]))
    if stamp != _summary_of(project, row).stamp:
        read_usable(project, row)
    return _summary_of(project, row).costs


def _summary_of(project: Project, row: int) -> ImageSummary:
    """Return the summary of an image, which is made once."""
    rows, name = project.summaries.rows, project.names[row]
    if row not in rows:
        stamp = stamp_of(annotations_of(project.folder, name))
        try:
            made = _summarize(name, project.read(row), stamp)
        except GigamaskError as error:
            made = _damaged(name, error, stamp)
        project.summaries.put(row, made)
    return rows[row]


def _damaged(name: str, error: GigamaskError, stamp: tuple[int, ...] | None) -> ImageSummary:
    unknown = dict.fromkeys(("objects", "accepted", "truth"), 0)
    told = {"open": [], "held_out": False, "categories": {}}
    listed = {"name": utf8_name(name), "status": "damaged", "fault": str(error), **unknown, **told}
    return ImageSummary(listed, {}, stamp)


def _summarize(name: str, edits: ImageEdits, stamp: tuple[int, ...] | None) -> ImageSummary:
    objects = list(edits.objects.values())
    listed = {
        "name": utf8_name(name),
        "status": edits.status,
        "objects": len(objects),
        "accepted": sum(each.accepted for each in objects),
        "truth": sum(each.is_truth for each in objects),
        "open": [each.certainty for each in objects if each.is_open],
        "held_out": edits.held_out,
        "categories": Counter(each.category for each in objects),
    }
    return ImageSummary(listed, edits.costs(), stamp)
