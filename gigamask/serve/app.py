"""The addresses of the page: what the browser asks for, checked, and what it gets.

All that is written here is JSON, JPEGs and the page's own files; which image, run or checkpoint is meant is said by numbers and names from our own
lists, never by a path. A `Fault` becomes one line with status 422, what is not there 404.

Not here: who may ask (`serve.guard`), what is answered (`serve.studio`, `serve.shelf`, `serve.logbook`).
"""

from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from gigamask import __version__
from gigamask.faults import Fault
from gigamask.serve.logbook import Logbook
from gigamask.serve.orders import Orders
from gigamask.serve.shelf import MOST_ROWS, Shelf
from gigamask.serve.studio import MOST_STEPS, MOST_TEXT, Step, Studio, Unknown

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
KEPT = {"cache-control": "private, max-age=3600"}

Row = Annotated[int, Field(ge=0)]
Count = Annotated[int, Query(ge=1, le=MOST_ROWS)]
Seed = Annotated[int, Query(ge=0, lt=2**63)]
Place = Annotated[int, Query(ge=0, lt=2**62)]
Name = Annotated[str, Query(max_length=400)]


class Prompt(BaseModel):
    """A point with its label, or a box; and which of the answers to it was chosen."""

    model_config = ConfigDict(extra="forbid")
    point: tuple[float, float] | None = None
    foreground: bool = True
    box: tuple[float, float, float, float] | None = None
    chosen: Annotated[int, Field(ge=0, le=2)] | None = None


class Question(BaseModel):
    """What is asked about a picture."""

    model_config = ConfigDict(extra="forbid")
    steps: Annotated[list[Prompt], Field(min_length=1, max_length=MOST_STEPS)]
    several: bool | None = None


class Text(BaseModel):
    """What is looked for."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(min_length=1, max_length=MOST_TEXT)]


@dataclass(frozen=True, eq=False)
class Rooms:
    """What the page shows; what is None has no tab, or says what to give."""

    studio: Studio | None = None
    shelf: Shelf | None = None
    orders: Orders | None = None
    logbook: Logbook | None = None
    weights: str | None = None


def build(rooms: Rooms) -> FastAPI:
    """Returns the application, without what guards it."""
    app = FastAPI(title="gigamask", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(Fault, _told)
    app.add_exception_handler(RequestValidationError, _invalid)
    for routes in (_page(), _about(rooms), _try(rooms), _data(rooms), _runs(rooms)):
        app.include_router(routes)
    return app


def _page() -> APIRouter:
    """Returns the addresses of the page's own files, which are read once."""
    routes = APIRouter()
    page, report = resources.files("gigamask.serve") / "page", resources.files("gigamask.report")
    files = {each.name: each.read_bytes() for each in page.iterdir() if each.name.rpartition(".")[2] in KINDS}
    files |= {name: (report / name).read_bytes() for name in ("charts.js", "charts.css")}

    def file(name: str) -> Response:
        if name not in files:
            raise Unknown("there is no such file")
        return Response(files[name], media_type=KINDS[name.rpartition(".")[2]], headers={"cache-control": "no-cache"})

    routes.add_api_route("/", lambda: file("index.html"), include_in_schema=False)
    routes.add_api_route("/page/{name}", file, include_in_schema=False)
    return routes


def _about(rooms: Rooms) -> APIRouter:
    routes = APIRouter(prefix="/api")

    @routes.get("/about")
    def about() -> dict[str, Any]:
        """What this page can show."""
        studio, shelf = rooms.studio, rooms.shelf
        return {
            "version": __version__,
            "weights": rooms.weights,
            "side": studio.model.spec.input_side if studio else None,
            "words": bool(studio and studio.asker),
            "data": len(shelf.index) if shelf else None,
            "runs": rooms.logbook is not None,
        }

    return routes


def _try(rooms: Rooms) -> APIRouter:
    routes = APIRouter(prefix="/api/pictures")

    def studio() -> Studio:
        return _given(rooms.studio, "--weights WEIGHTS")

    @routes.post("")
    async def show(request: Request, name: Annotated[str, Query(max_length=200)] = "picture") -> dict[str, Any]:
        """Takes a JPEG, PNG or WebP as the body."""
        raw = await request.body()
        return await run_in_threadpool(studio().show, raw, name)

    @routes.post("/of-data/{row}")
    def show_row(row: Row) -> dict[str, Any]:
        """Takes an image of the data."""
        raw, name, own = _shelf(rooms).file(row)
        return studio().show(raw, name, own)

    @routes.get("/{key}/jpeg")
    def pixels(key: str) -> Response:
        return _jpeg(studio().jpeg(key))

    @routes.post("/{key}/embed")
    def embed(key: str) -> dict[str, Any]:
        return studio().embed(key)

    @routes.post("/{key}/ask")
    def ask(key: str, question: Question) -> list[dict[str, Any]]:
        """Answers the last of some prompts."""
        return studio().ask(key, [Step(**vars(each)) for each in question.steps], question.several)

    @routes.post("/{key}/everything")
    def everything(key: str) -> list[dict[str, Any]]:
        return studio().everything(key)

    @routes.post("/{key}/words")
    def words(key: str, text: Text) -> dict[str, Any]:
        return studio().words(key, text.text)

    return routes


def _data(rooms: Rooms) -> APIRouter:
    routes = APIRouter(prefix="/api/data")

    def orders() -> Orders:
        return _given(rooms.orders, "--data PATH")

    @routes.get("")
    def about() -> dict[str, Any]:
        return _shelf(rooms).about()

    @routes.get("/images")
    def images(first: Place = 0, count: Count = 24) -> list[dict[str, Any]]:
        return _shelf(rooms).listed(first, count)

    @routes.get("/images/{row}")
    def masks(row: Row) -> dict[str, Any]:
        return _shelf(rooms).masks(row)

    @routes.get("/images/{row}/jpeg")
    def pixels(row: Row) -> Response:
        return _jpeg(_shelf(rooms).jpeg(row))

    @routes.get("/images/{row}/thumbnail")
    def thumbnail(row: Row) -> Response:
        return _jpeg(_shelf(rooms).thumbnail(row))

    @routes.get("/statistics")
    def statistics() -> dict[str, Any]:
        return _shelf(rooms).statistics

    @routes.get("/drawn")
    def drawn(sampler: Name, epoch: Place = 0, position: Place = 0, count: Count = 12, seed: Seed = 0) -> dict[str, Any]:
        return orders().drawn(sampler, epoch, position, count, seed)

    @routes.get("/exposed")
    def exposed(sampler: Name, seed: Seed = 0) -> dict[str, Any]:
        return orders().exposed(sampler, seed)

    return routes


def _runs(rooms: Rooms) -> APIRouter:
    routes = APIRouter(prefix="/api/runs")

    def logbook() -> Logbook:
        return _given(rooms.logbook, "--runs DIR")

    @routes.get("")
    def runs() -> list[dict[str, Any]]:
        return logbook().listed()

    @routes.get("/run")
    def run(name: Name) -> dict[str, Any]:
        return logbook().run(name)

    @routes.get("/picture")
    def picture(name: Name, file: Name) -> Response:
        raw, kind = logbook().picture(name, file)
        return Response(raw, media_type=kind, headers=KEPT)

    @routes.post("/verify")
    def verify(name: Name, step: Place) -> dict[str, Any]:
        return logbook().verify(name, step)

    @routes.get("/differences")
    def differences(one: Name, other: Name) -> list[dict[str, Any]]:
        return logbook().differences(one, other)

    return routes


def _shelf(rooms: Rooms) -> Shelf:
    return _given(rooms.shelf, "--data PATH")


def _given(room: Any, flag: str) -> Any:
    """Returns what is shown there, or says how to have it."""
    if room is None:
        raise Unknown(f"nothing was given to show here; start the page with {flag}")
    return room


def _jpeg(raw: bytes) -> Response:
    return Response(raw, media_type="image/jpeg", headers=KEPT)


def _told(request: Request, fault: Exception) -> JSONResponse:
    return JSONResponse({"fault": str(fault)}, 404 if isinstance(fault, Unknown) else 422)


def _invalid(request: Request, error: Exception) -> JSONResponse:
    told = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    return JSONResponse({"fault": f"{'.'.join(map(str, told['loc'][1:]))}: {told['msg']}"}, 422)
