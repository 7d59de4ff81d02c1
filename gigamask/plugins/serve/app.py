"""HTTP routes of the page: parse and check each request, and send JSON, JPEGs or page files.

Requests identify images, runs and checkpoints by numbers and names that the server lists, never by
paths. A `GigamaskError` becomes one line with status 422, or 404 if something does not exist.

Access control is in `security`, and the content of the responses in `session`,
`dataset_view`, `sampler_view` and `runs_view`; `project_routes` has the
routes of a project.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from gigamask import __version__, plugin
from gigamask.errors import GigamaskError
from gigamask.plugins.serve.dataset_view import MAX_ROWS, DatasetView
from gigamask.plugins.serve.open_images import Json, NotFoundError
from gigamask.plugins.serve.pictures import Shows, picture_response
from gigamask.plugins.serve.project import SaveError, StaleError
from gigamask.plugins.serve.project_routes import (
    Body,
    OtherProjectError,
    ProjectState,
    Steps,
    identity_of,
    image_routes,
    loop_routes,
    operation_routes,
)
from gigamask.plugins.serve.prompt_batches import SupersededError
from gigamask.plugins.serve.runs_view import RunsView
from gigamask.plugins.serve.sampler_view import SamplerView
from gigamask.plugins.serve.session import Session, share_image

MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}

STATUS = {
    NotFoundError: 404,
    OtherProjectError: 410,
    StaleError: 409,
    SupersededError: 409,
    SaveError: 500,
    OSError: 500,
}
"""Status codes of errors; that of all others is 422."""

Row = Annotated[int, Field(ge=0)]
Count = Annotated[int, Query(ge=1, le=MAX_ROWS)]
Seed = Annotated[int, Query(ge=0, lt=2**63)]
Number = Annotated[int, Query(ge=0, lt=2**62)]
Name = Annotated[str, Query(max_length=400)]


class PredictBody(Body):
    """The prompts on an image, in order."""

    steps: Steps
    multimask_output: bool | None = None


class TextBody(Body):
    """A text to find masks for."""

    text: Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, eq=False)
class AppState:
    """State of the page; a part that is None has no tab, and its routes name the missing flag.

    Attributes:
        session: A model to try.
        dataset: An index to browse.
        runs: A folder of runs.
        weights: Source of the model, for display.
        project: A project to annotate.
        compared: A second model, whose masks are shown beside those of the first.
        compared_weights: Source of the second model, for display.
    """

    session: Session | None = None
    dataset: DatasetView | None = None
    runs: RunsView | None = None
    weights: str | None = None
    project: ProjectState | None = None
    compared: Session | None = None
    compared_weights: str | None = None

    def ask_to_stop(self) -> None:
        """Ask all that is being computed to stop."""
        if self.project:
            self.project.annotator.project.stopping.set()
            self.project.stop()
        for session in filter(None, (self.session, self.compared)):
            session.stopping.set()

    def stop(self) -> None:
        """Stop all that is being computed, and wait for it; nothing that is saved is lost."""
        self.ask_to_stop()
        if self.project:
            self.project.stop(wait=True)
        for session in filter(None, (self.session, self.compared)):
            session.stop()


def build(state: AppState) -> FastAPI:
    """Return the application without its security middleware."""
    app = FastAPI(title="gigamask", version=__version__, docs_url=None, redoc_url=None)
    for fault in (GigamaskError, OSError):  # such as of a full disk
        app.add_exception_handler(fault, _fault)
    app.add_exception_handler(RequestValidationError, _invalid)
    routers = _page_routes(), _about_routes(state), _image_routes(state)
    for router in (*routers, _data_routes(state), _run_routes(state)):
        app.include_router(router)
    if state.project is not None:
        for make in (image_routes, operation_routes):
            app.include_router(make(state.project.annotator))
        app.include_router(loop_routes(state.project))
    return app


def _page_routes() -> APIRouter:
    """Return the routes of the page's own files, which are read once."""
    router = APIRouter()
    page, report = map(resources.files, ("gigamask.plugins.serve", "gigamask.report"))
    paths = *(page / "page").iterdir(), report / "charts.js", report / "charts.css"
    suffixes = {path.name: path.name.rpartition(".")[2] for path in paths}
    files = {path.name: path.read_bytes() for path in paths if suffixes[path.name] in MEDIA_TYPES}

    def file(name: str) -> Response:
        if name not in files:
            raise NotFoundError("there is no such file")
        headers = {"cache-control": "no-cache"}
        return Response(files[name], media_type=MEDIA_TYPES[suffixes[name]], headers=headers)

    router.add_api_route("/", lambda: file("index.html"), include_in_schema=False)
    router.add_api_route("/page/{name}", file, include_in_schema=False)
    return router


def _about_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/api")

    @router.get("/about")
    def about() -> Json:
        """Return what this page can show."""
        session, dataset = state.session, state.dataset
        return {
            "version": __version__,
            "weights": state.weights,
            "side": session.model.config.image_size if session else None,
            "grounding": bool(session and session.text_model),
            "data": len(dataset.index) if dataset else None,
            "runs": state.runs is not None,
            "project": state.project and identity_of(state.project.annotator.project),
            "compared": state.compared_weights,
            "writers": list(plugin.merged("writers")),
        }

    return router


def _image_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/api/images")

    def session() -> Session:
        return _required(state.session, "--weights WEIGHTS")

    @router.post("")
    async def open_upload(
        request: Request, name: Annotated[str, Query(max_length=200)] = "image"
    ) -> Json:
        """Open the JPEG, PNG or WebP in the request body."""
        raw = await request.body()
        return await run_in_threadpool(session().open, raw, name)

    @router.post("/from-dataset/{row}")
    def open_row(row: Row) -> Json:
        """Open an image of the dataset."""
        raw, name, masks = _dataset(state).file(row)
        return session().open(raw, name, masks)

    @router.get("/{key}/jpeg")
    def jpeg(key: str) -> Response:
        return picture_response(session().jpeg(key), key, key)  # the key is that of its pixels

    @router.post("/{key}/embed")
    def embed(key: str) -> Json:
        return session().embed(key)

    @router.post("/{key}/predict")
    def predict(key: str, body: PredictBody) -> list[Json]:
        """Predict masks for a sequence of prompts."""
        return session().predict(key, body.steps, body.multimask_output)

    @router.post("/{key}/compare")
    def compare(key: str, body: PredictBody) -> Json:
        """Return the best mask of the second model for the same prompts."""
        compared = _required(state.compared, "--compare WEIGHTS")
        share_image(session(), compared, key)
        steps = [replace(step, chosen=None) for step in body.steps]
        return compared.predict(key, steps, body.multimask_output, best_only=True)[0]

    @router.post("/{key}/all-masks")
    def all_masks(key: str) -> list[Json]:
        return session().all_masks(key)

    @router.get("/{key}/progress")
    def progress(key: str) -> dict[str, float]:
        """Return the fraction of an image whose masks are generated."""
        return {"fraction": session().images.get(key).fraction}

    @router.post("/{key}/find")
    def find(key: str, body: TextBody) -> Json:
        return session().find(key, body.text)

    return router


def _data_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/api/data")

    @cache
    def samplers() -> SamplerView:
        return SamplerView(_dataset(state).index)

    @router.get("")
    def overview() -> Json:
        return _dataset(state).overview()

    @router.get("/images")
    def images(first: Number = 0, count: Count = 24) -> list[Json]:
        return _dataset(state).images(first, count)

    @router.get("/images/{row}")
    def masks(row: Row) -> Json:
        return _dataset(state).masks(row)

    @router.get("/images/{row}/jpeg")
    def jpeg(row: Row, shows: Shows = "") -> Response:
        return picture_response(_dataset(state).jpeg(row), _dataset(state).version(row), shows)

    @router.get("/images/{row}/thumbnail")
    def thumbnail(row: Row, shows: Shows = "") -> Response:
        return picture_response(_dataset(state).thumbnail(row), _dataset(state).version(row), shows)

    @router.get("/statistics")
    def statistics() -> Json:
        return _dataset(state).statistics

    @router.get("/sampler")
    def sampled(
        name: Name, epoch: Number = 0, position: Number = 0, count: Count = 12, seed: Seed = 0
    ) -> Json:
        return samplers().images(name, epoch, position, count, seed)

    @router.get("/sampler/statistics")
    def sampler_statistics(name: Name, seed: Seed = 0) -> Json:
        return samplers().statistics(name, seed)

    return router


def _run_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/api/runs")

    def view() -> RunsView:
        return _required(state.runs, "--runs FOLDER")

    @router.get("")
    def runs() -> list[Json]:
        return view().runs()

    @router.get("/run")
    def run(name: Name) -> Json:
        return view().run(name)

    @router.get("/picture")
    def picture(name: Name, file: Name, shows: Shows = "") -> Response:
        raw, media_type, version = view().picture(name, file)
        return picture_response(raw, version, shows, media_type)

    @router.post("/verify")
    def verify(name: Name, step: Number) -> Json:
        return view().verify(name, step)

    @router.get("/differences")
    def differences(one: Name, other: Name) -> list[Json]:
        return view().differences(one, other)

    return router


def _dataset(state: AppState) -> DatasetView:
    return _required(state.dataset, "--data PATH")


def _required(part: Any, flag: str) -> Any:
    """Return a part of the page; raise `NotFoundError` if it is None."""
    if part is None:
        raise NotFoundError(f"there is nothing to show here; start the page with {flag}")
    return part


def _fault(request: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 422)
    return JSONResponse({"error": str(error)}, status)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"][1:])) or "the request"
    # pydantic says "Input should be greater than 0".
    rule = first["msg"].replace("Input should", "must", 1)
    return JSONResponse({"error": f"{place} {rule}"}, 422)
