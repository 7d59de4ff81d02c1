"""A page over little things: an untrained model, the session's dozen scenes, a folder that runs may come to."""

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gigamask.data import index as indexes
from gigamask.model.start import build as build_model
from gigamask.serve.app import Rooms, build
from gigamask.serve.logbook import Logbook
from gigamask.serve.orders import Orders
from gigamask.serve.shelf import Shelf
from gigamask.serve.studio import Studio
from tests.little import SPEC


@pytest.fixture(scope="session")
def index(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> indexes.Index:
    return indexes.build(scenes, tmp_path_factory.mktemp("served") / "index")


@pytest.fixture(scope="session")
def model():
    return build_model(replace(SPEC, informed_start=True), 0).eval()


@pytest.fixture
def studio(model) -> Studio:
    return Studio(model)


@pytest.fixture
def shelf(index: indexes.Index) -> Shelf:
    return Shelf(index)


@pytest.fixture
def orders(index: indexes.Index) -> Orders:
    return Orders(index)


@pytest.fixture
def client(studio: Studio, shelf: Shelf, tmp_path: Path) -> TestClient:
    """What a browser would be answered, without what guards it."""
    return TestClient(build(Rooms(studio, shelf, Orders(shelf.index), Logbook(tmp_path), "little")))
