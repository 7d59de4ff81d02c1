"""The routes: valid requests are answered, wrong ones get one line and a status, and only our own
files are sent.
"""

from dataclasses import replace
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient

from gigamask import __version__
from gigamask.models.init import build_model
from gigamask.plugins.serve.app import AppState, build
from gigamask.plugins.serve.dataset_view import MAX_ROWS
from gigamask.plugins.serve.project import SaveError
from gigamask.plugins.serve.runs_view import RunsView
from gigamask.plugins.serve.session import Session
from tests.little import SPEC
from tests.plugins.serve.annotated import click_at, picture
from tests.plugins.serve.unit.test_session import encode


def shown(client):
    return client.post(
        "/api/images?name=a.png", content=encode(picture()), headers={"content-type": "image/png"}
    ).json()["id"]


@pytest.mark.slow
def test_status_lists_what_is_available(client):
    told = client.get("/api/about").json()
    assert told == {
        "version": __version__,
        "weights": "little",
        "side": 64,
        "grounding": False,
        "data": 12,
        "runs": True,
        "project": None,
        "compared": None,
        "writers": told["writers"],
    }


@pytest.mark.slow
def test_the_pages_own_files_are_sent_and_no_others(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<canvas" in page.text
    for name in ("try.js", "charts.js"):
        assert client.get(f"/page/{name}").headers["content-type"].startswith("text/javascript")
    for name in ("style.css", "charts.css"):
        assert client.get(f"/page/{name}").headers["content-type"].startswith("text/css")
    for other in ("/page/app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/docs", "/redoc"):
        assert client.get(other).status_code == 404


def test_image_is_uploaded_embedded_prompted_and_sent_back(client):
    key = shown(client)
    assert client.post(f"/api/images/{key}/embed", json={}).json()["cached"] is False
    found = client.post(f"/api/images/{key}/predict", json={"steps": [{"point": [3, 4]}]}).json()
    assert len(found) == 3
    assert found[0]["predicted_iou"] >= found[2]["predicted_iou"]
    two = {"steps": [{"point": [3, 4], "chosen": found[1]["number"]}, {"box": [0, 0, 20, 20]}]}
    assert len(client.post(f"/api/images/{key}/predict", json=two).json()) == 1
    assert client.get(f"/api/images/{key}/progress").json() == {"fraction": 0.0}
    sent = client.get(f"/api/images/{key}/jpeg")
    assert sent.headers["content-type"] == "image/jpeg"
    assert sent.content[:2] == b"\xff\xd8"


@pytest.mark.slow
def test_a_second_model_answers_the_same_prompts(session, model):
    other = build_model(replace(SPEC, custom_init=True), 7).eval()
    state = AppState(session, weights="one", compared=Session(other), compared_weights="two")
    client = TestClient(build(state))
    assert client.get("/api/about").json()["compared"] == "two"
    steps = {"steps": [{"point": [3, 4], "chosen": 1}, {"point": [9, 9]}]}
    found = client.post(f"/api/images/{shown(client)}/compare", json=steps).json()
    alone = Session(other)
    key = alone.open(encode(picture()), "a")["id"]
    assert found == alone.predict(key, [click_at(3.0, 4.0), click_at(9.0, 9.0)])[0]


@pytest.mark.slow
def test_all_masks_of_an_image_of_the_data_are_the_models(client):
    """No mask of an untrained model passes the thresholds, but the image has annotations."""
    told = client.post("/api/images/from-dataset/2", json={}).json()
    assert told["masks"] > 0
    assert client.post(f"/api/images/{told['id']}/all-masks", json={}).json() == []


@pytest.mark.slow
def test_data_and_runs_are_listed(client):
    assert len(client.get("/api/data/images?first=2&count=3").json()) == 3
    assert client.get("/api/data/images/2").json()["row"] == 2
    for kind in ("thumbnail", "jpeg"):
        assert client.get(f"/api/data/images/2/{kind}").content[:2] == b"\xff\xd8"
    for path in ("/api/data", "/api/data/statistics"):
        assert client.get(path).json()["images"] == 12
    assert len(client.get("/api/data/sampler?name=random&count=4").json()["images"]) == 4
    assert client.get("/api/data/sampler/statistics?name=random").json()["items"] == 12
    assert client.get("/api/runs").json() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, json, status, words",
    [
        ("/api/images/none/jpeg", None, 404, "no longer cached"),
        ("/api/images/none/progress", None, 404, "no longer cached"),
        ("/api/images/KEY/predict", {"steps": []}, 422, "steps"),
        ("/api/images/KEY/predict", {"steps": [{"point": ["a", 1]}]}, 422, "point"),
        ("/api/images/KEY/predict", {"steps": [{"path": "/etc"}]}, 422, "path"),
        ("/api/images/KEY/predict", {"steps": [{"point": [999, 1]}]}, 422, "outside"),
        ("/api/images/KEY/find", {"text": "red"}, 422, "--grounding RUN"),
        ("/api/images/KEY/find", {"text": "x" * 301}, 422, "text"),
        ("/api/images/from-dataset/99", {}, 404, "there is no image 99"),
        ("/api/data/images/99", None, 404, "there is no image 99"),
        ("/api/data/images/-1", None, 422, "row"),
        ("/api/data/images?count=100000", None, 422, str(MAX_ROWS)),
        ("/api/data/sampler?name=none", None, 404, "no sampler"),
        ("/api/data/sampler?name=random&position=-1", None, 422, "position"),
        ("/api/runs/run?name=../..", None, 404, "no such run"),
        ("/api/runs/verify?name=a&step=1", {}, 404, "no such run"),
    ],
)
def test_invalid_request_gets_a_one_line_error(client, path, json, status, words):
    path = path.replace("KEY", shown(client)) if "KEY" in path else path
    answer = client.request("GET" if json is None else "POST", path, json=json)
    assert answer.status_code == status
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


@pytest.mark.parametrize("kind", [OSError, SaveError])
def test_an_error_of_the_system_is_one_line_and_not_of_the_request(client, monkeypatch, kind):
    monkeypatch.setattr(RunsView, "runs", Mock(side_effect=kind("no space left")))
    answer = client.get("/api/runs")
    assert (answer.status_code, answer.json()) == (500, {"error": "no space left"})


@pytest.mark.parametrize(
    "path, flag",
    [("/api/data", "--data"), ("/api/runs", "--runs"), ("/api/images/a/jpeg", "--weights")],
)
def test_what_was_not_given_says_how_to_give_it(path, flag):
    answer = TestClient(build(AppState())).get(path)
    assert answer.status_code == 404
    assert flag in answer.json()["error"]
