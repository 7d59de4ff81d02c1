"""What the page does to the objects of an image: prompts, strokes, polygons, splits, names.

All masks are computed here, from the prompts and shapes that the page sends; the page only shows
them. Every operation is one edit of the project.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import cv2
import numpy as np
from jaxtyping import Bool, Int32, UInt8

from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError
from gigamask.masks.boundary import farthest_point
from gigamask.masks.components import connected_components, paste, subtract
from gigamask.masks.rle import RLEMasks, union
from gigamask.plugins.serve.edits import UNEDITED, Edit, ImageEdits, MaskObject, Origin
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.plugins.serve.photographs import utf8_name
from gigamask.plugins.serve.pictures import file_version
from gigamask.plugins.serve.project import Project, replaced
from gigamask.plugins.serve.prompt_steps import PromptStep, checked_points
from gigamask.plugins.serve.session import Session, masks_to_json, shown_pixels

MIN_PART_PX = 4
"""Parts with fewer pixels are left out when an object is split."""
POLYGON_ERROR_PX = 1.5
"""How far the corners of a polygon may be from the outline of its mask."""
MAX_CORNERS = 2000
DOCUMENT_FIELDS = ("version", "held_out", "status")

Size = tuple[int, int]
Point = tuple[float, float]
Target = int | str


@dataclass(frozen=True)
class Stroke:
    """A stroke of the brush or the eraser.

    Attributes:
        points: Its path in pixels, counted from 0.
        radius: Half its width in pixels.
        erase: Whether it removes pixels.
    """

    points: tuple[Point, ...]
    radius: float
    erase: bool = False


class Annotator:
    """Applies the operations of the page to a project, with the model of a session."""

    def __init__(self, project: Project, session: Session) -> None:
        """Start without opened images.

        Args:
            project: The project.
            session: Holds the model, and the images while they are open.
        """
        self.project, self.session = project, session
        self._keys: dict[int, tuple[str, str, Size]] = {}

    def open(self, row: int) -> Json:
        """Open an image and return its name, size and objects."""
        key, size = self.with_key(row)
        stored, edits = self.project.names[row], self.project.read(row, size)
        notes = [self.session.images.get(key).note, *replaced(self.project, row, edits)]
        if stored != (name := utf8_name(stored)):
            notes.append("its name is not UTF-8: exports leave it out until it is renamed")
        return {
            "row": row,
            "name": name,
            "height": size[0],
            "width": size[1],
            "shows": version_shown(self, row),
            "pixels": key,
            "note": "; ".join(filter(None, notes)),
            **to_json(edits),
        }

    def with_key(self, row: int) -> tuple[str, Size]:
        """Return the id in the session and the size of an image, opened unless it is."""
        version = version_shown(self, row)
        known, key, size = self._keys.get(row, ("", "", (0, 0)))
        if known != version or key not in self.session.images:
            name = self.project.names[row]
            raw = read_file(self.project.path_of(row), name)
            opened = self.session.open(raw, name, halve=True)
            key, size = opened["id"], (opened["height"], opened["width"])
            self._keys[row] = version, key, size
        return key, size

    def prompt(self, row: int, version: int, target: Target, step: PromptStep) -> ImageEdits:
        """Add a prompt to an object, or begin one, and predict its mask.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            target: Id of the object; the name of its category begins one.
            step: The prompt.
        """
        key, size = self.with_key(row)
        adds = step.box is not None or step.foreground
        key_of, before = _begin(self.project, self.project.read(row, size), target, adds)
        base, steps = before.base, before.steps
        given = None if base is None else _mask(base, size)
        if given is not None and not steps and given.areas()[0]:
            steps = (_inside(given),)
        steps = (*steps, step)
        best = self.session.predict(key, steps, base=given, best_only=True)[0]
        changed = _answered(self.project, before, steps, best)
        with self.project.lock:
            if isinstance(target, str):  # it may have been renamed meanwhile
                _check_category(self.project, target)
            return self.project.edit(row, version, Edit("prompt", {key_of: changed}), size)

    def choose(self, row: int, version: int, target: int) -> ImageEdits:
        """Take the next best of the masks predicted for an object's only prompt.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            target: Id of the object.
        """
        key, size = self.with_key(row)
        before = _object(self.project.read(row, size), target)
        if len(before.steps) != 1 or before.base is not None:
            raise GigamaskError("only a first click or box has several masks; undo the others")
        masks = self.session.predict(key, before.steps)
        same = [i for i, each in enumerate(masks) if each["segmentation"]["counts"] == before.mask]
        chosen = [i for i in same if masks[i]["number"] == before.steps[0].chosen]
        best = masks[([*chosen, *same, -1][0] + 1) % len(masks)]
        steps = (replace(before.steps[0], chosen=best["number"]),)
        changed = _answered(self.project, before, steps, best)
        return self.project.edit(row, version, Edit("prompt", {target: changed}), size)

    def stroke(self, row: int, version: int, target: Target, stroke: Stroke) -> ImageEdits:
        """Draw on the mask of an object, or begin one.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            target: Id of the object; the name of its category begins one.
            stroke: The stroke.
        """
        found = _edits(self, row)
        size = found.size
        key_of, before = _begin(self.project, found, target, not stroke.erase)
        points = checked_points(stroke.points, size)
        if not len(points) or stroke.radius < 0:
            raise GigamaskError(
                f"the radius of a stroke must be at least 0 (got {stroke.radius}), and it needs a"
                " point; draw it again"
            )
        path = np.round(points).astype(np.int32)
        width = max(1, round(2 * min(stroke.radius, max(size))))

        def draw(dense: UInt8[np.ndarray, "h w"], paths: list[Int32[np.ndarray, "_ 2"]]) -> None:
            if len(path) == 1:
                cv2.circle(dense, paths[0][0].tolist(), max(0, width // 2), 1, -1)
            else:
                cv2.polylines(dense, [paths[0][:, None]], False, 1, width)

        drawn = _drawn(size, [path], draw, width)
        mask = _mask(before.mask, size)
        if stroke.erase:
            mask = subtract(mask, drawn)
        else:
            mask = union(RLEMasks.concatenate([mask, drawn]), np.zeros(2, np.int64), 1)
        return self._redrawn(row, version, "stroke", {key_of: before}, mask)

    def polygon(
        self,
        row: int,
        version: int,
        target: Target,
        rings: Sequence[Sequence[Sequence[float | int]]],
    ) -> ImageEdits:
        """Replace the mask of an object by polygons, or begin one.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            target: Id of the object; the name of its category begins one.
            rings: Corners of outlines and holes, in pixels counted from 0.
        """
        found = _edits(self, row)
        key_of, before = _begin(self.project, found, target)
        corners = [checked_points(ring) for ring in rings]
        if not corners or min(map(len, corners)) < 3 or sum(map(len, corners)) > MAX_CORNERS:
            raise GigamaskError(f"a polygon has 3 corners or more, at most {MAX_CORNERS} in all")
        limit = np.array(found.size[::-1])
        if any((ring < 0).any() or (ring > limit).any() for ring in corners):
            raise GigamaskError(f"corners must lie in the image of {limit[0]} x {limit[1]} pixels")
        rounded = [np.round(ring.clip(0, limit - 1)).astype(np.int32) for ring in corners]
        drawn = _drawn(found.size, rounded, lambda dense, paths: cv2.fillPoly(dense, paths, 1))
        return self._redrawn(row, version, "polygon", {key_of: before}, drawn)

    def corners(self, row: int, target: int) -> list[list[list[int]]]:
        """Return the outlines of an object's mask as polygons; holes are outlines, too.

        Args:
            row: Row of the image.
            target: Id of the object.
        """
        found = _edits(self, row)
        dense, corner = _crop(_mask(_object(found, target).mask, found.size))
        outlines, _ = cv2.findContours(
            dense.view(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE, offset=corner
        )
        polygons = []
        for each in outlines:
            ring = cv2.approxPolyDP(each, POLYGON_ERROR_PX, True)
            if len(ring) < 3:  # a fiber or a dot keeps its outline, of three points or more
                ring = np.concatenate([each, each[-1:], each[-1:]])
            polygons.append(ring[:, 0].tolist())
        return polygons

    def split(self, row: int, version: int, target: int) -> ImageEdits:
        """Make each connected part of an object an object of its own; the largest keeps its id.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            target: Id of the object.
        """
        found = _edits(self, row)
        before = _object(found, target)
        parts = connected_components(_mask(before.mask, found.size))
        parts = parts[parts.areas() >= MIN_PART_PX]
        if len(parts) < 2:
            raise GigamaskError("this object is in one piece; erase a line through it first")
        keys = [target, *range(found.next_id, found.next_id + len(parts) - 1)]
        return self._redrawn(row, version, "split", dict.fromkeys(keys, before), parts)

    def assign(
        self, row: int, version: int, targets: Sequence[int], fields: Json | None
    ) -> ImageEdits:
        """Accept, name or categorize objects, or delete them.

        Args:
            row: Row of the image.
            version: The version that the page shows.
            targets: Ids of the objects.
            fields: `accepted`, `name` or `category`; None deletes the objects.
        """
        found = _edits(self, row)
        if fields and "category" in fields:
            _check_category(self.project, fields["category"])
        objects = {target: _object(found, target) for target in targets}
        if fields and fields.get("accepted"):
            for target, each in objects.items():
                if not _mask(each.mask, found.size).areas()[0]:
                    raise GigamaskError(f"object {target} is empty; draw it or delete it")
        changes = {
            target: None if fields is None else _assigned(each, fields)
            for target, each in objects.items()
        }
        edit = Edit("delete" if fields is None else "assign", changes)
        return self.project.edit(row, version, edit, found.size)

    def _redrawn(
        self, row: int, version: int, kind: str, objects: dict[int, MaskObject], masks: RLEMasks
    ) -> ImageEdits:
        """Save objects with the masks that were drawn, from which prompts continue."""
        changes: dict[int, MaskObject | None] = {
            key: replace(
                before,
                mask=counts.decode(),
                base=counts.decode(),
                steps=(),
                accepted=False,
                predicted_iou=None,
                stability=None,
                origin=_changed_by_a_person(before, "drawn"),
            )
            for (key, before), counts in zip(objects.items(), masks.to_coco(), strict=True)
        }
        return self.project.edit(row, version, Edit(kind, changes), masks.size)


def _edits(annotator: Annotator, row: int) -> ImageEdits:
    """Return the edits of an image, which has the size that they state."""
    return annotator.project.read(row, annotator.with_key(row)[1])


def _changed_by_a_person(before: MaskObject, how: Literal["drawn", "clicked"]) -> Origin:
    """Return how a mask came that a person changes now."""
    if before.by_model:
        return "corrected"
    return "drawn" if before.came == "drawn" and before.mask else how


def _assigned(before: MaskObject, fields: Json) -> MaskObject:
    """Return an object with fields that a person who looks at it sets."""
    changed = replace(before, **fields)
    if "accepted" not in fields or before.came not in UNEDITED:
        return changed
    return replace(changed, origin="accepted" if changed.accepted else "proposed")


def _inside(mask: RLEMasks) -> PromptStep:
    """Return a click in the middle of a mask: without it, a correction says where, but not what."""
    dense, (left, top) = _crop(mask)
    x, y, _ = farthest_point(dense)
    return PromptStep(point=(float(left + x), float(top + y)))


def _mask(counts: str, size: Size) -> RLEMasks:
    """Return a mask; an empty one of an object that just begins."""
    return RLEMasks.from_coco([counts or [size[0] * size[1]]], size)


def _crop(mask: RLEMasks) -> tuple[Bool[np.ndarray, "h w"], tuple[int, int]]:
    """Return the pixels of a mask within its box, and the x and y of its first one."""
    x0, y0, x1, y1 = mask.boxes()[0].tolist()
    crop = mask.resample(np.arange(y0, max(y1, y0) + 1), np.arange(x0, max(x1, x0) + 1))
    return np.ascontiguousarray(crop.to_dense()[0]), (x0, y0)


def _drawn(
    size: Size,
    paths: Sequence[Int32[np.ndarray, "_ 2"]],
    draw: Callable[[UInt8[np.ndarray, "h w"], list[Int32[np.ndarray, "_ 2"]]], object],
    margin: int = 0,
) -> RLEMasks:
    """Return what is drawn along paths, of which only their surroundings are drawn.

    Args:
        size: (H, W) of the image.
        paths: Points xy within the image.
        draw: Draws paths on a part of the image.
        margin: How far from its path something is drawn at most, in pixels.
    """
    together = np.concatenate(paths)
    x0, y0 = np.maximum(together.min(0) - margin, 0).tolist()
    x1, y1 = np.minimum(together.max(0) + margin + 1, size[::-1]).tolist()
    dense = np.zeros((max(y1 - y0, 1), max(x1 - x0, 1)), np.uint8)
    draw(dense, [path - np.array([x0, y0], np.int32) for path in paths])
    crop = RLEMasks.from_dense(dense[None] > 0)
    return paste(crop, x0, y0, size)


def version_shown(annotator: Annotator, row: int) -> str:
    """Return the version of what the page shows of an image: of its file and the window.

    Args:
        annotator: The project, and the session with the model.
        row: Row of the image.
    """
    pixels = shown_pixels(annotator.session.model)
    return file_version(annotator.project.path_of(row), pixels)


def to_json(edits: ImageEdits) -> Json:
    """Return the objects of an image as JSON, and whether there is something to undo or redo."""
    objects = edits.objects
    masks = RLEMasks.from_coco([each.mask for each in objects.values()], edits.size)
    described = masks_to_json(masks, {})
    return {
        **{name: getattr(edits, name) for name in DOCUMENT_FIELDS},
        "done": edits.status == "done",
        "can_undo": edits.undoable > 0,
        "can_redo": edits.applied < len(edits.edits),
        "objects": [
            {
                "id": key,
                **shape,
                **{
                    name: value
                    for name, value in vars(each).items()
                    if name not in ("mask", "base")
                },
                "steps": [vars(step) for step in each.steps],
                "certainty": each.certainty,
                "is_open": each.is_open,
            }
            for (key, each), shape in zip(objects.items(), described, strict=True)
        ],
    }


def _object(found: ImageEdits, target: int) -> MaskObject:
    if target not in found.objects:
        raise NotFoundError(f"there is no object {target} in this image any more")
    return found.objects[target]


def _answered(
    project: Project, before: MaskObject, steps: tuple[PromptStep, ...], best: Json
) -> MaskObject:
    """Return an object with the mask that the model in use answered."""
    return replace(
        before,
        mask=best["segmentation"]["counts"],
        steps=steps,
        accepted=False,
        predicted_iou=best["predicted_iou"],
        stability=best["stability"],
        origin=_changed_by_a_person(before, "clicked"),
        model=project.content.model,
    )


def _begin(
    project: Project, found: ImageEdits, target: Target, adds: bool = True
) -> tuple[int, MaskObject]:
    """Return the id of an object and the object; one of the category `target` if it is new.

    Args:
        project: The project.
        found: What the image has.
        target: Id of the object; the name of its category begins one.
        adds: Whether the edit adds pixels, without which none begins.
    """
    if isinstance(target, str):
        if not adds:
            raise GigamaskError("no object is selected to remove from; select one first (V)")
        _check_category(project, target)
        return found.next_id, MaskObject("", category=target)
    return target, _object(found, target)


def _check_category(project: Project, name: str) -> None:
    """Raise `GigamaskError` if there is no such category, perhaps not any more."""
    if name not in {each.name for each in project.content.categories}:
        raise GigamaskError(
            f"there is no category {name}, perhaps not any more; add it, or load the page again"
        )
