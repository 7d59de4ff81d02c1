"""A page over an untrained model, twelve synthetic images, and an empty folder of runs."""

from dataclasses import replace
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from gigamask.data import index as indexes
from gigamask.models.init import build_model
from gigamask.plugins.serve.app import AppState, build
from gigamask.plugins.serve.dataset_view import DatasetView
from gigamask.plugins.serve.runs_view import RunsView
from gigamask.plugins.serve.session import Session
from tests.little import SPEC


@pytest.fixture(scope="session")
def index(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> indexes.Index:
    return indexes.build(scenes, tmp_path_factory.mktemp("served") / "index")


@pytest.fixture(scope="session")
def model():
    return build_model(replace(SPEC, custom_init=True), 0).eval()


@pytest.fixture
def session(model) -> Session:
    return Session(model)


@pytest.fixture
def dataset(index: indexes.Index) -> DatasetView:
    return DatasetView(index)


@pytest.fixture
def client(session: Session, dataset: DatasetView, tmp_path: Path) -> TestClient:
    """A client of the page without its security middleware."""
    return TestClient(build(AppState(session, dataset, RunsView(tmp_path), "little")))
