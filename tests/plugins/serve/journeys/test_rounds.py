"""A round of the page that was stopped, and killed with the server, ends as one that was not."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from gigamask.plugins.serve import training_round
from gigamask.serialization import read_json
from gigamask.training.checkpoint import load_model
from tests.journeys.runs import GIGAMASK, kill_all, wait_until
from tests.plugins.serve.annotated import annotated, save_untrained
from tests.plugins.serve.journeys.test_serve import get, served

RUN = "/run?name=0001%2Frun"
TRAIN = "/train", {"minutes": 0.05}


@pytest.fixture
def project(tmp_path):
    """Three annotated images, and a small model."""
    save_untrained(tmp_path)
    with annotated(tmp_path, (60, 90)):
        pass
    return tmp_path / "project"


@contextmanager
def killed(*words):
    """Start the page, and kill it and the processes that it started in the end."""
    command = f"{GIGAMASK} serve --no-token --port 0 --progress none".split()  # an address first
    with subprocess.Popen(
        [*command, *map(str, words)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            kill_all(process)


def loop(address, path="", body=None):
    headers = {"content-type": "application/json"}
    sent = None if body is None else json.dumps(body).encode()
    status, found = get(f"{address}api/project/loop{path}", headers, sent)
    return json.loads(found) if status == 200 else {}


def wait_for(address, state, step=0):
    """Wait until the training is in a state and has made a step; return its step."""

    def made():
        return loop(address, RUN).get("step") or 0

    def reached():
        training = loop(address)["training"]
        assert training["state"] in ("running", state), training
        return training["state"] == state and made() >= step

    wait_until(reached, 120)
    return made()


@pytest.mark.long
def test_a_round_resumes_exactly(project, tmp_path, monkeypatch):
    flags = ("--project", project, "--weights", tmp_path / "little.safetensors", "--device", "cpu")
    with killed(*flags) as address:
        loop(address, *TRAIN)
        wait_for(address, "running", 2)
        loop(address, "/stop", {})
        stopped_at = wait_for(address, "stopped")
        loop(address, *TRAIN)
        # A round saves every 20 steps, so those since the stop are repeated.
        killed_at = wait_for(address, "running", stopped_at + 3)
    with served(*flags) as address:
        assert loop(address)["training"]["state"] == "stopped"
        loop(address, *TRAIN)
        made = wait_for(address, "finished")
        result = loop(address)["rounds"][0]
    folder, whole = project / "rounds" / "0001", tmp_path / "whole"
    steps = read_json(folder / "round.json")["steps"]
    assert 2 <= stopped_at < killed_at < made == steps
    shutil.copytree(folder, whole, ignore=shutil.ignore_patterns("run", "result.json", ".lock"))
    monkeypatch.setattr(sys, "argv", ["training_round", str(whole)])
    assert training_round.main() == 0
    resumed, alone = (load_model(str(each / "run"), "cpu").state_dict() for each in (folder, whole))
    assert all(torch.equal(resumed[name], alone[name]) for name in alone)
    assert result.pop("verdict") == "too few to tell"
    assert result == read_json(whole / "result.json")
    first = load_model(str(tmp_path / "little.safetensors"), "cpu").state_dict()
    assert any(not torch.equal(first[name], alone[name]) for name in alone)
