"""A folder of its own for each test, and Slurm's commands."""

import os

import pytest

from tests.journeys.pages import ROOT
from tests.plugins.cluster import fake_slurm


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder of the commands of Slurm and their state, which is first on PATH."""
    folder = tmp_path / "slurm"
    fake_slurm.install(folder)
    monkeypatch.setenv("FAKE_SLURM", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("gigamask.plugins.cluster.slurm.POLL_S", 0.1)
    return folder
