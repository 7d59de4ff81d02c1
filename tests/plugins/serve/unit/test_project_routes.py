"""Requests on a project: valid ones are answered, stale and wrong ones get one line."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from gigamask.plugins.serve.annotator import Annotator
from gigamask.plugins.serve.app import AppState, build
from gigamask.plugins.serve.project import Project
from gigamask.plugins.serve.project_routes import ProjectState
from gigamask.plugins.serve.prompt_batches import SupersededError
from gigamask.plugins.serve.proposals import Proposals
from gigamask.plugins.serve.rounds import Rounds
from gigamask.plugins.serve.session import Session
from tests.plugins.serve.annotated import save_pictures

IMAGE = "/api/project/images/0"
STROKE = {"version": 0, "points": [[5, 5]], "radius": 3}
PROMPT = {"version": 1, "step": {"point": [3, 4]}}


def client_of(project, session):
    annotator = Annotator(project, session)
    state = ProjectState(annotator, Proposals(annotator), Rounds(annotator, "little", "cpu"))
    return TestClient(build(AppState(session, weights="little", project=state)))


@contextmanager
def served(folder, session):
    """Yield a project with a client of its page."""
    save_pictures(folder / "photos", ("a.png", "b.png"), (30, 40))
    (folder / "photos" / "c.jpg").write_bytes(b"no image")
    with Project.open(folder / "project", folder / "photos") as project:
        yield project, client_of(project, session)


@pytest.fixture
def opened(tmp_path, session):
    with served(tmp_path, session) as found:
        yield found


@pytest.fixture
def project(opened):
    return opened[0]


@pytest.fixture
def client(opened):
    return opened[1]


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory, model):
    """A project and its client for requests that change nothing."""
    with served(tmp_path_factory.mktemp("served"), Session(model)) as found:
        yield found


@pytest.mark.slow
def test_an_image_is_opened_drawn_on_and_marked_as_done(client, session, monkeypatch):
    asked = []

    def post(path, **body):
        return client.post(f"{IMAGE}/{path}", json=body)

    def superseded(key, steps, best_only, client):
        asked.append(client)
        raise SupersededError("another preview was asked for")

    shown = client.get("/api/project/images").json()
    assert [each["name"] for each in shown["images"]] == ["a.png", "b.png", "c.jpg"]
    opened = client.get(IMAGE).json()
    assert (opened["height"], opened["width"], opened["version"]) == (30, 40, 0)
    for picture in ("jpeg", "thumbnail"):
        assert client.get(f"{IMAGE}/{picture}").content[:2] == b"\xff\xd8"
    assert post("embed").json()["cached"] is False
    steps = [PROMPT["step"]]
    assert post("preview", steps=steps).json()["area"] >= 0
    monkeypatch.setattr(session, "predict", superseded)
    assert post("preview", steps=steps, client="me").status_code == 409
    assert asked == ["me"]
    assert post("stroke", **STROKE).json()["objects"][0]["area"] > 9
    assert client.get(f"{IMAGE}/corners/1").json()
    named = post("assign", version=1, objects=[1], accepted=True, name="x").json()
    assert named["objects"][0]["name"] == "x"
    other = f"{IMAGE[:-1]}1"
    client.post(f"{other}/history", json={"version": 0, "by": 0})
    assert client.post(f"{other}/stroke", json=STROKE | {"version": 1}).status_code == 200
    done = post("done", version=2, done=True).json()
    assert (done["status"], done["held_out"]) == ("done", True)
    undone = post("history", version=3, by=-2).json()
    assert (undone["objects"], undone["can_redo"]) == ([], True)
    assert client.get("/api/project/loop").json()["training"] == {"state": "none"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, body, status, words",
    [
        (f"{IMAGE}/stroke", STROKE | {"version": 3}, 409, "changed elsewhere"),
        (f"{IMAGE}/stroke", STROKE | {"object": 7}, 404, "no object 7"),
        (f"{IMAGE}/stroke", STROKE | {"points": []}, 422, "points"),
        (f"{IMAGE}/stroke", STROKE | {"path": "/etc"}, 422, "path"),
        (f"{IMAGE}/prompt", {"version": 0, "step": {"point": [99, 1]}}, 422, "outside the image"),
        (f"{IMAGE}/split", {"version": 0}, 404, "no object 0"),
        (f"{IMAGE}/assign", {"version": 0, "objects": [1], "category": "../x"}, 422, "no category"),
        ("/api/project/images/2/embed", {}, 422, "c.jpg"),
        ("/api/project/images/3/embed", {}, 404, "no image 3"),
        ("/api/project/images/..%2f..%2fetc/embed", {}, 404, ""),
        ("/api/project/export", {"formats": ["voc"]}, 422, "formats voc: must be one of coco"),
        ("/api/project/loop/train", {"minutes": 2}, 422, "one is held out"),
        ("/api/project/loop/train", {"minutes": -1}, 422, "minutes"),
        ("/api/project/categories", {"categories": []}, 422, "categories"),
    ],
)
def test_wrong_requests_get_one_line_and_change_nothing(unchanged, path, body, status, words):
    project, client = unchanged
    answer = client.post(path, json=body)
    assert answer.status_code == status
    assert words in answer.text
    assert "\n" not in answer.text
    assert not (project.folder / "annotations").exists()


@pytest.mark.slow
def test_categories_that_another_page_has_added_stay(client, project):
    """Each page sends those that it knows, and a new one."""
    old = {"name": "object", "color": "#0072b2"}
    cell, nucleus = ({"name": name, "color": "#112233"} for name in ("cell", "nucleus"))
    for given, found in (
        ([old, cell], [old, cell]),
        ([old, nucleus], [old, cell, nucleus]),  # whose numbers in exports stay
        ([cell | {"color": "#445566"}], [old, cell, nucleus]),
    ):
        answer = client.post("/api/project/categories", json={"categories": given})
        assert answer.json() == {"categories": found}
    assert [each.name for each in project.content.categories] == ["object", "cell", "nucleus"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("stroke", {"points": [[5, 5]], "radius": 3}),
        ("prompt", {"step": {"point": [5, 5]}}),
        ("polygon", {"rings": [[[1, 1], [9, 1], [9, 9]]]}),
    ],
)
def test_a_category_that_another_page_has_renamed_does_not_come_back(unchanged, path, body):
    project, client = unchanged
    answer = client.post(f"{IMAGE}/{path}", json={"version": 0, "category": "cat", **body})
    assert (answer.status_code, project.read(0).version) == (422, 0)
    assert "there is no category cat, perhaps not any more" in answer.text


@pytest.mark.slow
def test_a_picture_that_was_replaced_while_it_was_shown_is_not_annotated(client, project):
    headers = {"x-pixels": client.get(IMAGE).json()["pixels"]}
    photo = project.path_of(0)
    photo.touch()  # the same picture
    assert client.post(f"{IMAGE}/stroke", json=STROKE, headers=headers).status_code == 200
    Image.fromarray(np.full((30, 40, 3), 9, np.uint8)).save(photo)
    answer = client.post(f"{IMAGE}/prompt", json=PROMPT, headers=headers)
    assert (answer.status_code, len(project.read(0).edits)) == (409, 1)
    assert "is another picture than the one shown" in answer.json()["error"]
    headers = {"x-pixels": client.get(IMAGE).json()["pixels"]}
    assert client.post(f"{IMAGE}/prompt", json=PROMPT, headers=headers).status_code == 200


@pytest.mark.slow
def test_an_object_that_is_not_accepted_any_more_is_not_in_an_image_that_is_done(client):
    def post(path, **body):
        version = client.get(IMAGE).json()["version"]
        told = client.post(f"{IMAGE}/{path}", json={"version": version, **body}).json()
        return told["status"], told["done"]

    post("prompt", step={"point": [5, 5]})
    post("stroke", object=1, points=[[5, 5]], radius=3)
    post("assign", objects=[1], accepted=True)
    assert post("done", done=True) == ("done", True)
    assert post("stroke", object=1, points=[[9, 9]], radius=3) == ("in progress", False)
    assert post("assign", objects=[1], accepted=True) == ("done", True)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
@pytest.mark.parametrize(
    "path, body",
    [
        (f"{IMAGE}/polygon", '{"version": 0, "rings": [[[1, 1], [9, #], [5, 9]]]}'),
        (f"{IMAGE}/stroke", '{"version": 0, "points": [[5, #]], "radius": 3}'),
        (f"{IMAGE}/stroke", '{"version": 0, "points": [[5, 5]], "radius": #}'),
        (f"{IMAGE}/prompt", '{"version": 0, "step": {"point": [#, 1]}}'),
        (f"{IMAGE}/prompt", '{"version": 0, "step": {"box": [1, 1, #, 9]}}'),
        (f"{IMAGE}/prompt", '{"version": 0, "step": {"point": [1, 1], "chosen": #}}'),
        (f"{IMAGE}/preview", '{"steps": [{"point": [1, #]}]}'),
        (f"{IMAGE}/done", '{"version": #, "done": true}'),
        (f"{IMAGE}/assign", '{"version": 0, "objects": [#], "accepted": true}'),
        ("/api/project/loop/train", '{"minutes": #}'),
        ("/api/project/loop/accept", '{"threshold": #}'),
        ("/api/project/loop/use", '{"model": #}'),
        ("/api/images/x/predict", '{"steps": [{"point": [1, #]}]}'),
    ],
)
def test_no_number_from_outside_is_used_unless_it_is_finite_and_in_range(
    unchanged, path, body, number
):
    project, client = unchanged
    headers = {"content-type": "application/json"}
    answer = client.post(path, content=body.replace("#", number), headers=headers)
    assert 400 <= answer.status_code < 500
    assert project.read(0).version == 0


@pytest.mark.slow
def test_only_pictures_of_the_version_that_was_asked_for_are_kept_by_browsers(
    client, project, session, monkeypatch
):
    def listed():
        return client.get("/api/project/images").json()["images"][0]["shows"]

    def kept(shows):
        pictures = [client.get(f"{IMAGE}/{kind}?shows={shows}") for kind in ("jpeg", "thumbnail")]
        [told] = {each.headers.get("cache-control", "") for each in pictures}
        return told.startswith("private, max-age"), pictures[0].content

    first = listed()
    was_kept, before = kept(first)
    assert was_kept
    assert not kept("")[0]
    pixels = np.full((30, 40, 3), 200, np.uint8)
    Image.fromarray(pixels).save(project.path_of(0))
    assert listed() != first
    assert kept(first) == (False, kept(listed())[1])
    assert kept(listed())[1] != before
    second = listed()
    config = session.model.config
    stated = replace(config, pixels=config.pixels.stated((0.0, 9.0), ()))
    monkeypatch.setattr(session.model, "config", stated)
    assert listed() != second


@pytest.mark.slow
def test_a_page_of_another_project_changes_nothing(client, project):
    mine = client.get("/api/about").json()["project"]
    for identity, status in (("another", 410), (mine, 200)):
        headers = {"x-project": identity}
        assert client.post(f"{IMAGE}/stroke", json=STROKE, headers=headers).status_code == status
        assert client.get("/api/project/loop", headers=headers).status_code == status
        assert bool(project.read(0).objects) == (status == 200)
