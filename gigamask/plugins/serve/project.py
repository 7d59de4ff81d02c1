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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from gigamask import files
from gigamask.data import image_folder
from gigamask.errors import GigamaskError
from gigamask.files import exclusive_lock, folder_lock
from gigamask.pixels import WindowOptions
from gigamask.plugins.serve.edits import Edit, ImageEdits, MaskCost
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.plugins.serve.photographs import (
    annotations_of,
    content_of,
    folder_of_images,
    missing_names,
    stamp_of,
    unread_files,
    utf8_name,
)
from gigamask.serialization import read_json

VERSION = 1
EXPORT = "export"
"""Folder of what is exported."""
PROJECT = "project.json"
MAX_FILE_BYTES = 2**24
"""Limit of one image's edits; beyond it, the older half becomes one edit."""
HELD_OUT_OF = 10
"""One image of this number is held out."""
LEAST_MASKS, LEAST_IMAGES = 20, 5
"""Fewer held-out masks, or of fewer images, do not tell which model is better."""


class StaleError(GigamaskError):
    """Raised if a change was made for another version of an image's annotations."""


class SaveError(GigamaskError):
    """Raised if a file of a project cannot be written."""


@dataclass(frozen=True)
class ObjectCategory:
    """A category of objects and its color, as #rrggbb."""

    name: str
    color: str


@dataclass(frozen=True)
class TrainingRound:
    """A finished training: clicks to an IoU of 0.9 on the held-out images before and after.

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
        renamed: What categories are called now, by the names that models may know them by.
    """

    images: str
    version: int = VERSION
    categories: tuple[ObjectCategory, ...] = (ObjectCategory("object", "#0072b2"),)
    rounds: tuple[TrainingRound, ...] = ()
    model: int = -1
    pixels: WindowOptions = field(default_factory=WindowOptions)
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Version:
    version: int = 0


@dataclass(frozen=True)
class ImageSummary:
    """What is known of an image without reading its annotations.

    Attributes:
        listed: What the list says, as `Project.summary`.
        costs: What its masks cost, by model.
        judged: Proposals that a person judged, as `ImageEdits.judged`.
        stamp: That of the file of annotations (`photographs.stamp_of`).
    """

    listed: Json
    costs: dict[int, MaskCost] = field(default_factory=dict)
    judged: tuple[tuple[int | None, float, bool], ...] = ()
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
            cannot be read; `lost_images` pairs them.
        stopping: Set when the server stops; an export ends then.
        lock: Held while anything is changed.
        exporting: Held while an export is written.
        unread: Files that may be photographs and are not read, by kind.
        summaries: What the list says of each image.
    """

    folder: Path
    content: ProjectFile
    names: list[str]
    missing: dict[str, int | None] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event, repr=False)
    lock: Any = field(default_factory=threading.RLock, repr=False)
    exporting: Any = field(default_factory=threading.Lock, repr=False)
    unread: list[str] = field(default_factory=list)
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
        root = folder_of_images(images if images is not None else str(content and content.images))
        places = folder, root, folder / EXPORT
        here, seen, exported = (Path(os.path.realpath(each)) for each in places)
        if here.is_relative_to(seen) or seen.is_relative_to(exported):
            raise GigamaskError(
                f"--project {folder}: lies in --images {root}, or these in its folder {EXPORT}, so "
                "that its exports would be images of it; give a folder beside that"
            )
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
            opened.unread = unread_files(root)
            if content is None or content.images != root:
                opened.update(images=root)
            yield opened

    def summary(self) -> list[Json]:
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
        try:
            path.stat()
        except FileNotFoundError:
            return ImageEdits(size or (0, 0))
        except OSError:  # as of a name that is too long, which the next line says
            pass
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
            if len(raw) > MAX_FILE_BYTES and changed.undoable > 1:
                changed = changed.merged()
                raw = msgspec.json.encode(changed)
            path = annotations_of(self.folder, self.names[row])
            write(path, raw)
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
            held_out = sum(each["held_out"] and each["truth"] > 0 for each in finished)
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
            write(self.folder / PROJECT, msgspec.json.format(msgspec.json.encode(changed)))
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


def replaced(project: Project, row: int, edits: ImageEdits) -> list[str]:
    """Return a line if the file of an image is not the one that was annotated.

    Args:
        project: The project.
        row: Row of the image.
        edits: Its edits.
    """
    contents = {edits.content, content_of(project.path_of(row))} - {None}  # of unknown ones
    name = utf8_name(project.names[row])
    line = f"{name}: is another file than the one that was annotated; check its masks"
    return [line] if len(contents) > 1 else []


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


def write(path: Path, raw: bytes) -> None:
    """Write a file of a project; raise `SaveError` if it cannot be.

    Args:
        path: The file.
        raw: Its new content.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_bytes(path, raw)
    except OSError as error:
        raise SaveError(
            f"{path}: cannot be saved ({error.strerror}), so the last change is lost; free space "
            "or correct the permissions, and repeat it"
        ) from None


def progress(project: Project) -> list[Json]:
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


def judged(project: Project) -> list[tuple[int, int]]:
    """Return of the proposals of the model in use how many a person judged, and kept as they were.

    Returns:
        Both numbers at each hundredth of certainty, from 0 to 1.
    """
    counts = [(0, 0)] * 101
    for each in project.summaries.rows.copy().values():
        for model, certainty, kept in each.judged:
            if model == project.content.model:
                at = int(100 * min(certainty, 1.0) + 1e-6)
                counts[at] = (counts[at][0] + 1, counts[at][1] + kept)
    return counts


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
    return ImageSummary(listed, stamp=stamp)


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
    return ImageSummary(listed, edits.costs(), tuple(edits.judged()), stamp)
