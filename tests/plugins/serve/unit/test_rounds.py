"""Trainings of a project: their states, their data, and which model is used."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gigamask.data.mask_sampling import MaskFilters
from gigamask.pixels import PixelConfig, WindowOptions
from gigamask.plugins.serve import training_round
from gigamask.plugins.serve.annotator import Annotator
from gigamask.plugins.serve.project import ObjectCategory, TrainingRound
from gigamask.plugins.serve.rounds import LOG, RESULT, SETTINGS, Rounds
from gigamask.plugins.serve.training_round import make_config, run_round
from gigamask.serialization import read_json
from gigamask.training.checkpoint import load_model
from tests.errors import error_line
from tests.plugins.serve.annotated import annotated, save_untrained
from tests.plugins.serve.unit.test_project import names

SIZE = (40, 60)
KILL = "__import__('os').kill(__import__('os').getpid(), 9)"


@pytest.fixture
def rounds(tmp_path, session):
    """Three images that are done, of which the first is held out."""
    with annotated(tmp_path, SIZE) as project:
        yield Rounds(Annotator(project, session), str(save_untrained(tmp_path)), "cpu")


def start(rounds, monkeypatch, code):
    """Start a training whose process only writes a line and ends."""
    script = f"print('what went wrong'); raise SystemExit({code})"
    monkeypatch.setattr("gigamask.plugins.serve.rounds.COMMAND", ("-c", script))
    rounds.train(1.0)
    rounds._process.wait()
    return rounds.status()["training"]


@pytest.fixture
def folder(rounds, monkeypatch):
    """Of a training that was stopped."""
    start(rounds, monkeypatch, 75)
    return rounds.folder / "0001"


@pytest.mark.parametrize(
    "code, state", [(75, "stopped"), (KILL, "stopped"), (2, "failed"), (1, "failed")]
)
def test_how_a_training_ended_is_said(rounds, monkeypatch, code, state):
    assert rounds.status()["training"] == {"state": "none"}
    found = start(rounds, monkeypatch, code)
    assert found["state"] == state
    assert found.get("fault") == (None if state == "stopped" else "what went wrong")


def test_what_a_training_leaves_out_is_said(rounds, monkeypatch):
    rounds.project.path_of(2).unlink()
    start(rounds, monkeypatch, 75)
    [line] = rounds.status()["unused"]
    assert line.startswith("training: 2.png: ")
    assert names(rounds.folder / "0001" / "train") == ["1.png"]


def test_the_held_out_image_is_not_trained_on(folder):
    assert names(folder / "train") == ["1.png", "2.png"]
    assert names(folder / "held_out") == ["0.png"]


def settings_of(folder):
    return read_json(folder / SETTINGS, training_round.RoundSettings)


@pytest.mark.slow
def test_images_of_16_bits_are_trained_on_as_they_are_shown(rounds, folder):
    """By the window that the page was given, or else by percentiles; others state neither."""
    assert settings_of(folder).pixels is None
    photos, session = Path(rounds.project.content.images), rounds.annotator.session
    deep = np.random.default_rng(0).integers(3000, 5001, SIZE, dtype=np.uint16)
    Image.fromarray(deep).save(photos / "2.png")
    shown = session.model
    for window, expected in (((), PixelConfig(percentiles=(0.5, 99.5))), ((3e3, 5e3), None)):
        session.model = deepcopy(shown).set_window(window)
        rounds._prepare(1.0)
        found = make_config(folder, settings_of(folder)).model.pixels
        assert found == (expected or PixelConfig(window=window))
        read = settings_of(folder).load_model(rounds.weights, "cpu")
        assert read.config.pixels == found


def test_models_without_a_window_read_images_by_that_of_the_project(rounds):
    rounds.project.update(pixels=WindowOptions(window=(0.0, 300.0)))
    for own, expected in (((), (0.0, 300.0)), ((5.0, 9.0), (5.0, 9.0))):
        rounds._first = deepcopy(rounds._first)
        rounds._first.config = replace(rounds._first.config, pixels=PixelConfig(window=own))
        rounds.use(-1)
        assert rounds.annotator.session.model.config.pixels.window == expected


@pytest.mark.slow
def test_two_categories_are_trained_as_classes(rounds, folder):
    assert make_config(folder, settings_of(folder)).model.class_names == ()
    cell = ObjectCategory("cell", "#112233")
    rounds.project.update(categories=(*rounds.project.content.categories, cell))
    rounds._prepare(1.0)
    assert make_config(folder, settings_of(folder)).model.class_names == ("object", "cell")


@pytest.mark.slow
def test_a_round_is_trained_compared_and_used(rounds, folder, monkeypatch):
    settings = settings_of(folder)
    assert settings.init == rounds.weights
    config = make_config(folder, replace(settings, steps=2))
    assert config.freeze == ("image_encoder",)
    assert config.loader.filters == MaskFilters(max_area=None), "a person accepted them"
    monkeypatch.setattr(training_round, "measure_step", lambda config, steps: 30.0)
    monkeypatch.setattr(training_round, "count_processes", lambda *given: 1)
    monkeypatch.setattr(
        training_round, "make_config", lambda *given: make_config(*given).with_(processes=1)
    )
    result = run_round(folder)
    assert read_json(folder / SETTINGS)["steps"] == 2
    assert 1 <= result.after <= 20
    status = rounds.status()
    assert status["training"]["state"] == "finished"
    assert status["rounds"] == [vars(result) | {"verdict": "too few to tell"}]
    assert result.class_accuracy is None
    assert status["model"] == -1
    rounds.use(0)
    weights = rounds.weights_of(0)
    trained = load_model(weights, "cpu").mask_decoder.state_dict()
    used = rounds.annotator.session.model.mask_decoder.state_dict()
    assert all((trained[name] == used[name]).all() for name in trained)
    again = Rounds(rounds.annotator, rounds.weights, "cpu")
    assert (again.status()["model"], again.current) == (0, weights)
    again.use(-1)
    with error_line("no round 2"):
        again.use(1)


def test_a_second_training_waits_for_the_first(rounds, monkeypatch):
    monkeypatch.setattr(
        "gigamask.plugins.serve.rounds.COMMAND", ("-c", "import time; time.sleep(60)")
    )
    rounds.train(1.0)
    with error_line("running already"):
        rounds.train(1.0)
    rounds.stop(wait=True)
    assert rounds.status()["training"]["state"] == "stopped"
    assert not (rounds.folder / "0001" / RESULT).exists()
    assert (rounds.folder / "0001" / LOG).exists()


def test_the_standard_error_counts_images_as_draws():
    differences = np.repeat([1.0, 3.0, 2.0, 6.0], 5)
    images = np.repeat([4, 7, 8, 9], 5)
    expected = np.std([1.0, 3.0, 2.0, 6.0], ddof=1) / 2
    assert training_round.standard_error(differences, images) == pytest.approx(expected)
    assert training_round.standard_error(differences, np.zeros(20, int)) is None


def test_a_project_whose_model_is_lost_opens_with_the_first_one(rounds):
    lost = TrainingRound("rounds/0001/run", 9.0, 4.0)
    rounds.project.update(rounds=(lost,), model=0)
    again = Rounds(rounds.annotator, rounds.weights, "cpu")
    assert again.project.content.model == -1
    assert again.notice in again.status()["unused"]
    again.use(-1)  # somebody chose it
    assert again.status()["unused"] == []


def test_rounds_are_recorded_once_and_kept_whatever_else_is_in_their_folder(rounds):
    """A copy of a round, and rounds that an older project.json does not know."""
    third = TrainingRound("rounds/0003/run", 9.0, 4.0)
    for name in ("0003", "0003 copy"):
        (rounds.folder / name).mkdir()
        (rounds.folder / name / SETTINGS).write_text("{}")
    (rounds.folder / "0003" / RESULT).write_text(json.dumps(vars(third)))
    for _ in range(3):
        assert rounds.status()["training"]["state"] == "finished"
    assert rounds.project.content.rounds == (third,)
    assert rounds._prepare(1.0).name == "0004"
