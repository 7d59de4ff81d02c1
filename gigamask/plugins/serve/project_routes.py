"""HTTP routes of a project: its images, the operations on their objects, and the loop of training.

Images and objects are numbers, categories are names that the project lists. Every operation names
the version of the image that the page shows; a stale one gets status 409.
"""

import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Header, Query
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from gigamask.data import image
from gigamask.data.orientation import turn_upright
from gigamask.datatools.export_formats import COCO, check_formats
from gigamask.datatools.image_files import read_file
from gigamask.errors import GigamaskError
from gigamask.plugins.serve.annotator import MAX_CORNERS, Annotator, Stroke, to_json, version_shown
from gigamask.plugins.serve.categories import change_category
from gigamask.plugins.serve.dataset_view import MAX_DECODING
from gigamask.plugins.serve.lost_images import pair_by_content, unused
from gigamask.plugins.serve.open_images import Json
from gigamask.plugins.serve.pictures import Shows, picture_response, version_of
from gigamask.plugins.serve.project import EXPORT, ObjectCategory, Project, StaleError
from gigamask.plugins.serve.project_export import DEFAULT_FORMATS, export
from gigamask.plugins.serve.prompt_steps import MAX_PROMPTS, PromptStep
from gigamask.plugins.serve.proposals import Proposals
from gigamask.plugins.serve.rounds import Rounds
from gigamask.plugins.serve.session import encode_jpeg, is_large, shrunk

THUMBNAIL_PX = 160
MAX_STROKE_POINTS = 4000
MAX_OBJECTS = 5000

Row = Annotated[int, Field(ge=0)]
Version = Annotated[int, Field(ge=0)]
Key = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(max_length=100)]
Color = Annotated[str, Field(pattern="^#[0-9a-f]{6}$")]
Told = Annotated[str, Header(max_length=64)]
Pair = tuple[float, float]
Steps = Annotated[list[PromptStep], Field(min_length=1, max_length=MAX_PROMPTS)]


class OtherProjectError(GigamaskError):
    """Raised if a page asks for something of a project, or of photographs, served no longer."""


class Body(BaseModel):
    """A request without unknown fields, whose numbers are finite."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class PreviewBody(Body):
    """Prompts whose mask is shown but not kept; a client's newest replaces those that wait."""

    steps: Steps
    client: Name = ""


class ObjectBody(Body):
    """The version that the page shows, and an object; None begins one of the category."""

    version: Version
    object: Key | None = None
    category: Name = "object"

    @property
    def target(self) -> int | str:
        """Id of the object, or the category of a new one."""
        return self.object or self.category


class StepBody(ObjectBody):
    """A prompt on an object."""

    step: PromptStep


class StrokeBody(ObjectBody):
    """A stroke of the brush or the eraser."""

    points: Annotated[list[Pair], Field(min_length=1, max_length=MAX_STROKE_POINTS)]
    radius: Annotated[float, Field(ge=0, le=1000)]
    erase: bool = False


class PolygonBody(ObjectBody):
    """Outlines and holes of an object."""

    rings: Annotated[list[list[Pair]], Field(min_length=1, max_length=MAX_CORNERS)]


class AssignBody(Body):
    """What to change of objects."""

    version: Version
    objects: Annotated[list[Key], Field(min_length=1, max_length=MAX_OBJECTS)]
    accepted: bool | None = None
    name: Name | None = None
    category: Name | None = None
    delete: bool = False


class HistoryBody(Body):
    """Undo by -1, redo by 1."""

    version: Version
    by: Annotated[int, Field(ge=-10000, le=10000)]


class DoneBody(Body):
    """Whether an image is done."""

    version: Version
    done: bool


class CategoryBody(Body):
    """A category."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    color: Color


class CategoriesBody(Body):
    """Categories to add to those of the project."""

    categories: Annotated[list[CategoryBody], Field(min_length=1, max_length=200)]


class CategoryChangeBody(Body):
    """What becomes of a category; the name of another merges them."""

    name: Name
    new_name: Annotated[str, Field(min_length=1, max_length=100)]
    color: Color


class TrainBody(Body):
    """How long to train."""

    minutes: Annotated[float, Field(gt=0, le=600)] = 2.0


class ModelBody(Body):
    """Index of a round; -1 is the model that the project began with."""

    model: Annotated[int, Field(ge=-1)]


class AcceptBody(Body):
    """Least certainty of proposals to accept."""

    threshold: Annotated[float, Field(ge=0, le=1)]


class ExportBody(Body):
    """What to write, as in `project_export.export`."""

    formats: Annotated[list[Name], Field(min_length=1, max_length=9)] = list(DEFAULT_FORMATS)
    polygons: bool = False
    table: bool = False


@dataclass(frozen=True, eq=False)
class ProjectState:
    """A project with its operations, proposals and rounds."""

    annotator: Annotator
    proposals: Proposals
    rounds: Rounds

    def status(self) -> Json:
        """Return the state of the loop."""
        return {**self.rounds.status(), "proposing": dict(self.proposals.state)}

    def stop(self, wait: bool = False) -> None:
        """Stop proposals and training.

        Args:
            wait: Whether to wait until they have stopped.
        """
        self.proposals.stop(wait)
        self.rounds.stop(wait)


def identity_of(project: Project) -> str:
    """Return what rows mean: it differs for another project, folder, or list of images."""
    return version_of(os.path.abspath(project.folder), project.content.images, project.names)


def _router(project: Project, below: str = "", *more: Any) -> APIRouter:
    """Return a router that refuses pages of another project: their rows are other photographs.

    Args:
        project: The project.
        below: Path of the routes below that of the project.
        *more: Further dependencies.
    """

    identity = identity_of(project)

    def check(x_project: Told = "") -> None:
        if x_project and x_project != identity:
            raise OtherProjectError(
                "another project, or other photographs, are served at this address now, so nothing "
                "is changed; load the page again"
            )

    return APIRouter(prefix=f"/api/project{below}", dependencies=[Depends(check), *more])


def image_routes(annotator: Annotator) -> APIRouter:
    """Return the routes that show images and the model's masks.

    Args:
        annotator: The project and its session.
    """
    router = _router(annotator.project, "/images")
    project, session = annotator.project, annotator.session
    decoding, one = threading.Semaphore(MAX_DECODING), threading.Lock()

    @router.get("")
    def images(since: Version = 0) -> Response:
        """Return the list of images; with the number of a change, only those changed after it."""
        with project.lock:
            listed = project.summary()
            rows = project.summaries.since(since)
            content: Json = {
                "change": project.summaries.changes,
                "categories": project.content.categories,
                "missing": len(project.missing),
            }
        content["images"] = [
            {"row": row, "shows": version_shown(annotator, row), **listed[row]} for row in rows
        ]
        return Response(msgspec.json.encode(content), media_type="application/json")

    @router.get("/{row}")
    def open_image(row: Row) -> Json:
        return annotator.open(row)

    @router.get("/{row}/jpeg")
    def jpeg(row: Row, shows: Shows = "") -> Response:
        version = version_shown(annotator, row)
        return picture_response(session.jpeg(annotator.with_key(row)[0]), version, shows)

    @router.get("/{row}/thumbnail")
    def small(row: Row, shows: Shows = "") -> Response:
        version = version_shown(annotator, row)
        with decoding:
            raw = _thumbnail(project.path_of(row), one)
        return picture_response(raw, version, shows)

    @router.post("/{row}/embed")
    def embed(row: Row) -> Json:
        return session.embed(annotator.with_key(row)[0])

    @router.post("/{row}/preview")
    def preview(row: Row, body: PreviewBody) -> Json:
        key = annotator.with_key(row)[0]
        return session.predict(key, body.steps, best_only=True, client=body.client or None)[0]

    @router.post("/{row}/all-masks")
    def all_masks(row: Row) -> list[Json]:
        return session.all_masks(annotator.with_key(row)[0])

    return router


def operation_routes(annotator: Annotator) -> APIRouter:
    """Return the routes of the operations, each of which is one edit of an image.

    Args:
        annotator: The project and its session.
    """
    project = annotator.project

    def check(row: Row, x_pixels: Told = "") -> None:
        if x_pixels and x_pixels != annotator.with_key(row)[0]:
            raise StaleError(
                f"{project.names[row]}: is another picture than the one shown; load it again"
            )

    router = _router(project, "/images", Depends(check))

    @router.post("/{row}/prompt")
    def prompt(row: Row, body: StepBody) -> Json:
        return to_json(annotator.prompt(row, body.version, body.target, body.step))

    @router.post("/{row}/choose")
    def choose(row: Row, body: ObjectBody) -> Json:
        return to_json(annotator.choose(row, body.version, body.object or 0))

    @router.post("/{row}/stroke")
    def stroke(row: Row, body: StrokeBody) -> Json:
        drawn = Stroke(tuple(body.points), body.radius, body.erase)
        return to_json(annotator.stroke(row, body.version, body.target, drawn))

    @router.post("/{row}/polygon")
    def polygon(row: Row, body: PolygonBody) -> Json:
        return to_json(annotator.polygon(row, body.version, body.target, body.rings))

    @router.get("/{row}/corners/{target}")
    def corners(row: Row, target: Key) -> list[list[list[int]]]:
        return annotator.corners(row, target)

    @router.post("/{row}/split")
    def split(row: Row, body: ObjectBody) -> Json:
        return to_json(annotator.split(row, body.version, body.object or 0))

    @router.post("/{row}/assign")
    def assign(row: Row, body: AssignBody) -> Json:
        given = {name: getattr(body, name) for name in ("accepted", "name", "category")}
        fields = {name: value for name, value in given.items() if value is not None}
        changed = None if body.delete else fields
        return to_json(annotator.assign(row, body.version, body.objects, changed))

    @router.post("/{row}/history")
    def history(row: Row, body: HistoryBody) -> Json:
        _, size = annotator.with_key(row)
        return to_json(project.change(row, body.version, lambda found: found.moved(body.by), size))

    @router.post("/{row}/done")
    def done(row: Row, body: DoneBody) -> Json:
        _, size = annotator.with_key(row)
        return to_json(project.mark_done(row, body.version, body.done, size))

    return router


def loop_routes(state: ProjectState) -> APIRouter:
    """Return the routes of categories, export, training and proposals.

    Args:
        state: The project.
    """
    project = state.annotator.project
    router = _router(project)

    @router.post("/pair")
    def pair() -> Json:
        return {"paired": pair_by_content(project), "unused": unused(project)}

    @router.post("/categories")
    def categories(body: CategoriesBody) -> Json:
        given = {each.name: ObjectCategory(each.name, each.color) for each in body.categories}
        with project.lock:  # those that another page has added stay
            kept = {each.name: each for each in project.content.categories}
            project.update(categories=tuple((kept | given | kept).values()))
        return {"categories": project.content.categories}

    @router.post("/categories/change")
    def changed_category(body: CategoryChangeBody) -> dict[str, int]:
        return change_category(project, body.name, ObjectCategory(body.new_name, body.color))

    @router.post("/export")
    def export_all(body: ExportBody) -> Json:
        check_formats(body.formats, "formats")
        return export(project, project.folder / EXPORT, **vars(body), images=True)

    @router.get("/export/coco.json")
    def coco() -> FileResponse:
        path = project.folder / EXPORT / COCO
        if not path.is_file():
            raise GigamaskError("nothing is exported yet; export first")
        return FileResponse(path, media_type="application/json", filename=COCO)

    @router.get("/loop")
    def loop() -> Json:
        return state.status()

    @router.get("/loop/run")
    def run(name: Annotated[str, Query(max_length=40)]) -> Json:
        return state.rounds.runs.run(name)

    @router.post("/loop/train")
    def train(body: TrainBody) -> Json:
        state.rounds.train(body.minutes)
        return state.status()

    @router.post("/loop/use")
    def use(body: ModelBody) -> Json:
        state.rounds.use(body.model)
        return state.status()

    @router.post("/loop/propose")
    def propose() -> Json:
        state.proposals.start()
        return state.status()

    @router.post("/loop/stop")
    def stop() -> Json:
        state.stop()
        return state.status()

    @router.post("/loop/accept")
    def accept(body: AcceptBody) -> Json:
        return {"accepted": state.proposals.accept(body.threshold)}

    return router


def _thumbnail(path: Path, one: threading.Lock) -> bytes:
    """Return a small JPEG of an image; the lock is held while a large one is decoded."""
    raw = read_file(path, path.name)
    half = is_large(image.size(raw, path.name))
    with one if half else nullcontext():
        decoded = image.decode_preview(raw, path.name, half)
    return encode_jpeg(shrunk(turn_upright(decoded, raw), THUMBNAIL_PX))
