import os
from dataclasses import replace
from itertools import islice

import pytest

from gigamask.samplers.hard_examples import Replay
from gigamask.samplers.random import LazyShuffle, Random
from gigamask.samplers.shards import Streamed
from gigamask.training.config import check_resume
from gigamask.training.train_data import TrainData
from tests.errors import error_line
from tests.little import little


def visited(run, index) -> list[str]:
    """The images of the first epoch."""
    steps = islice(TrainData(run, index).batches(), len(index) // run.batch_size)
    return [name for step in steps for batch in step for name in batch.names]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [Random(), LazyShuffle(), Streamed(), Replay(share=0.0)],
    ids=lambda each: type(each).__name__,
)
def test_the_seed_of_a_run_names_its_order(index, sampler):
    run = replace(little(), sampler=sampler)
    first, again, other = (visited(replace(run, seed=seed), index) for seed in (0, 0, 1))
    assert len(set(first)) == len(index)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(other)


def test_another_seed_is_another_order_on_resume():
    run = little()
    with error_line(r"--seed.*0 in copied and.*1.*--allow-data-change"):
        check_resume(run, replace(run, seed=1, out="copied"), allow_data_change=False)
    assert check_resume(run, replace(run, seed=1), allow_data_change=True) == {"seed": (0, 1)}


def test_a_slash_after_a_folder_is_no_other_data_on_resume():
    run = replace(little(), data=("tars", "more"))
    check_resume(run, replace(run, data=("tars/", "more")), allow_data_change=False)
    with error_line("--data was tars more in .* and is now tars,"):
        check_resume(run, replace(run, data=("tars",)), allow_data_change=False)


def test_other_paths_of_the_same_files_are_the_same_data():
    run = replace(little(), data=("tars", "more"))
    same = replace(run, data=(f"{os.getcwd()}/tars", "./more"))
    check_resume(run, same, allow_data_change=False)
    with error_line("--data was tars more in .* and is now /tars more"):
        check_resume(run, replace(run, data=("/tars", "more")), allow_data_change=False)
