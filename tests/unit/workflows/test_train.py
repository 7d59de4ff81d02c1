from dataclasses import replace

import pytest
import torch

from gigamask import recipes
from gigamask.cli.commands.train import epochs_to_steps, stages_of
from gigamask.config_files import TrainFlags
from gigamask.workflows.train import limit_threads, steps_for_epochs
from tests.little import little


@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"), [(1.0, 3, 4), (1.0, 5, 3), (2.5, 4, 8), (0.01, 12, 1)]
)
def test_epochs_become_steps(tmp_path, scenes, epochs, batch_size, steps, capsys):
    config = replace(
        little(), data=(str(scenes),), out=str(tmp_path / "run"), batch_size=batch_size
    )
    assert steps_for_epochs(config, epochs) == (steps, 12)
    flags = epochs_to_steps(TrainFlags(config, epochs=epochs))
    assert flags == TrainFlags(replace(config, steps=steps))
    assert f"{steps} steps (12 samples" in capsys.readouterr().out


def test_epochs_are_those_of_the_last_stage(tmp_path, scenes):
    config = replace(little(), data=(str(scenes),), out=str(tmp_path / "run"))
    flags = epochs_to_steps(TrainFlags(config, epochs=45.0, stages="mae,decoder,joint"))
    assert [stage.steps for stage in stages_of(flags)[1:]] == [10, 180]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("recipe", "environment", "expected"),
    [
        ("tiny", {}, 1),
        ("compact", {}, 1),
        ("mae_tiny", {}, 1),
        ("tiny", {"OMP_NUM_THREADS": "3"}, 3),
        ("sam_vit_b", {}, 3),
    ],
)
def test_small_models_train_on_one_thread_unless_told(threads, recipe, environment, expected):
    limit_threads(replace(recipes.make(recipe), device="cpu"), environment)
    assert torch.get_num_threads() == expected
