"""The edits of one image of an annotation project, from which its objects follow."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from gigamask.errors import GigamaskError
from gigamask.plugins.serve.photographs import FileContent
from gigamask.plugins.serve.prompt_steps import PromptStep

IDLE_S = 30.0
"""A longer pause between two edits counts as this long."""
WORK = ("prompt", "stroke", "polygon", "split")
"""Kinds of edits that count as a click."""
MACHINE = ("propose", "accept all", "merged")
"""Kinds of edits that take no time of the annotator."""


Origin = Literal["drawn", "clicked", "corrected", "proposed", "accepted", "accepted in bulk"]
"""How a mask came: by hand; from a person's clicks; as a proposal that a person changed; as one
that nobody has accepted; that a person looked at and accepted; that was accepted unseen."""
UNEDITED = ("proposed", "accepted", "accepted in bulk")
"""Origins of masks that are a model's own answers, which do not count as truth."""


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
        """Whether it is a proposal that nobody has accepted or changed."""
        return not self.accepted and self.came == "proposed"


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
        done: Whether the annotator was finished with the image, as `status` says.
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

    @cached_property
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
        """How far the image is annotated; an object that is not accepted any more undoes "done"."""
        if self.done and all(each.accepted for each in self.objects.values()):
            return "done"
        kinds = {edit.kind for edit in self.edits[: self.applied]}
        if not kinds:
            return "not begun"
        return "proposed" if kinds <= set(MACHINE) else "in progress"

    @property
    def undoable(self) -> int:
        """How many applied edits can be undone: those since older ones were merged."""
        kinds = [edit.kind for edit in reversed(self.edits[: self.applied])]
        return [*kinds, "merged"].index("merged")

    def with_edit(self, edit: Edit) -> "ImageEdits":
        """Return the edits with one more; those that were undone are dropped."""
        edits = (*self.edits[: self.applied], edit)
        return self._changed_to(replace(self, edits=edits, applied=len(edits)))

    def _changed_to(self, after: "ImageEdits") -> "ImageEdits":
        """Return other edits, with which the image is not done if its last object is gone."""
        return replace(after, done=self.done and bool(after.objects or not self.objects))

    def moved(self, by: int) -> "ImageEdits":
        """Return the edits with more of them applied, or fewer if `by` is negative."""
        applied = self.applied + by
        if not -self.undoable <= by <= len(self.edits) - self.applied:
            raise GigamaskError(f"there is nothing to {'undo' if by < 0 else 'redo'}")
        return self._changed_to(replace(self, applied=applied))

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

    def judged(self) -> Iterator[tuple[int | None, float, bool]]:
        """Yield of each proposal that a person accepted, changed or deleted the model, its
        certainty, and whether it was kept as it was."""
        applied, objects = self.edits[: self.applied], self.objects
        last = next((each for each in reversed(applied) if each.kind == "propose"), None)
        for key, one in last.changes.items() if last else ():
            now = objects[key].came if key in objects else "deleted"
            if one is not None and now in ("accepted", "corrected", "deleted"):
                yield one.model, one.certainty, now == "accepted"

    def merged(self) -> "ImageEdits":
        """Return the same objects, made by one edit instead of the older half of those that can be
        undone; these keep what they cost, not their masks."""
        half = self.applied - self.undoable + self.undoable // 2
        older = [replace(edit, changes={}) for edit in self.edits[:half]]
        objects, last = replace(self, applied=half).objects, self.edits[half - 1]
        made = Edit("merged", dict(objects), last.time, last.round)
        edits = (*older, made, *self.edits[half:])
        return replace(self, edits=edits, applied=self.applied + 1)
