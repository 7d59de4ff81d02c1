"""How many loader processes a training starts unasked."""

import os

import pytest

from gigamask.training.data_source import loader_processes
from tests.errors import error_line


@pytest.mark.parametrize(
    "asked, on_gpu, cores, processes, expected",
    [
        (3, True, 64, 8, 3),
        (0, True, 64, 8, 0),
        (None, False, 64, 1, 1),
        (None, True, 64, 8, 7),
        (None, True, 16, 1, 15),
        (None, True, 2, 8, 1),
        (None, True, 256, 1, 24),
    ],
)
def test_loaders_take_the_cores_that_training_leaves(
    monkeypatch, asked, on_gpu, cores, processes, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert loader_processes(asked, on_gpu) == expected
    with error_line("--loader.workers 9999: more than four for each"):
        loader_processes(9999, on_gpu)
