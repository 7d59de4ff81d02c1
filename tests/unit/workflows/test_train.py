from dataclasses import replace

import pytest

from gigamask.config_files import TrainFlags
from gigamask.workflows.train import runs_of, with_steps
from tests.little import little


@pytest.mark.parametrize(
    ("epochs", "batch_size", "steps"), [(1.0, 3, 4), (1.0, 5, 3), (2.5, 4, 8), (0.01, 12, 1)]
)
def test_epochs_become_steps(tmp_path, scenes, epochs, batch_size, steps, capsys):
    run = replace(little(), data=(str(scenes),), out=str(tmp_path / "run"), batch_size=batch_size)
    flags = with_steps(TrainFlags(run, epochs=epochs))
    assert flags == TrainFlags(replace(run, steps=steps))
    assert f"{steps} steps (12 samples" in capsys.readouterr().out


def test_stages_are_as_long_as_the_epochs_of_the_last_one(tmp_path, scenes):
    run = replace(little(), data=(str(scenes),), out=str(tmp_path / "run"))
    staged = with_steps(TrainFlags(run, epochs=45.0, stages="mae,decoder,joint"))
    assert [each.steps for each in runs_of(staged)[1:]] == [10, 180]
