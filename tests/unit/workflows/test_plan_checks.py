"""A plan refuses what training refuses, with its line, or says what it assumes."""

import pytest

from gigamask import config_files, recipes
from gigamask.cli.commands.plan import PlanCommand
from gigamask.errors import GigamaskError
from gigamask.workflows import plan
from gigamask.workflows.own_data import use_own_data
from gigamask.workflows.plan_checks import check_trainable
from gigamask.workflows.stages import make_stages
from gigamask.workflows.train import resolve
from tests.errors import error_line

pytestmark = pytest.mark.usefixtures("no_shape_checks")


def refusal_of_training(words, out, data):
    flags = ["--out", str(out), *([] if "--data" in words else ["--data", str(data)])]
    command = recipes.make(words[0]).command
    try:
        run = config_files.parse_train([*words, *flags], command).run
        stages = make_stages(use_own_data(run, lambda line: None), None, {})
        for number, stage in enumerate(stages):
            resolve(stage, False, tuple(each.out for each in stages[:number]))
    except GigamaskError as error:
        return str(error).partition("; see 'gigamask")[0]
    return ""


def lines_of_plan(words):
    try:
        config = config_files.parse_recipe(words, "plan", PlanCommand).run_planned
        return check_trainable(recipes.require_images(config))
    except GigamaskError as error:
        return [str(error).partition("; see 'gigamask")[0]]


def check_plan(words, scenes, tmp_path):
    expected = refusal_of_training(words.split(), tmp_path / "run", scenes)
    lines = lines_of_plan(words.split())
    assert any(line.startswith(expected) for line in lines) if expected else lines == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "tiny",
        "tiny --steps 0",
        "tiny --model.image-size 100",
        "tiny --loader.workers -1",
        "tiny --freeze nothing",
        "tiny --freeze image_encoder",
        "tiny --lora 4",
        "tiny --val-split 0.5",
        "tiny --data x.json",
        "tiny --data x.json --images nowhere",
        "tiny --data nowhere",
        "tiny --evaluation.data nowhere",
        "tiny --init nowhere.pth",
        "compact --model.depth 24",
        "tiny --unfreeze norms",
        "mae_tiny",
        "mae_tiny --optimizer.lr -1",
    ],
)
def test_what_training_refuses_the_plan_refuses_or_states(words, scenes, tmp_path):
    check_plan(words, scenes, tmp_path)


@pytest.mark.slow
def test_weights_that_are_here_must_fit():
    config = recipes.make("tiny").with_(init="starter")
    with error_line(r"--model.encoder conv_pyramid"):
        check_trainable(config)
    assert check_trainable(recipes.make("compact").with_(init="starter")) == []


def test_weights_of_data_are_planned_before_the_data_are_there():
    run = recipes.make("tiny").with_(data_weights=(3, 1))
    assert check_trainable(run) == []
    assert plan.resolve(run.with_(data=("x", "y")), plan.Hardware()).data == ("x", "y")
    with error_line(r"^--data-weights needs a number for each of 3 paths"):
        plan.resolve(run.with_(data=("x", "y", "z")), plan.Hardware())


def test_paths_are_set_aside_only_if_they_are_missing(scenes, tmp_path):
    config = recipes.make("tiny")
    assert check_trainable(config.with_(data=scenes)) == []
    (tmp_path / "empty").mkdir()
    with error_line("empty"):
        check_trainable(config.with_(data=tmp_path / "empty"))
    [line] = check_trainable(config.with_(data="s3://bucket/tars"))
    assert "s3://bucket/tars" in line
