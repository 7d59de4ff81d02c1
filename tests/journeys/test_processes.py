"""Training in several processes of one machine, which the command or the Python API starts."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from gigamask.cli.main import INTERRUPTED
from gigamask.distributed.local_processes import start_world
from tests.commands import LITTLE, exit_code, invoke
from tests.errors import error_line
from tests.forked import COMMAND, Fork
from tests.journeys.runs import CONSTANT_LR, newest_step, records, same, wait_for_step
from tests.journeys.test_cluster import ENVIRONMENT
from tests.ranks import fork

SCRIPT = """
import sys
import gigamask
from gigamask import recipes
from gigamask.config_files import load_config
config = load_config(sys.argv[1], trust=True).with_(out=sys.argv[2], processes=2)
run = gigamask.train(config)
assert run.finished and run.folder.name == "api", run
"""
"""Trains what a run folder states, without `if __name__ == "__main__"`."""


@pytest.fixture
def words(scenes):
    sizes = "--batch-size 4 --micro-batch-size 2 --save-every 1"
    return " ".join([f"train {LITTLE} --data {scenes} {sizes}", *CONSTANT_LR])


def train(words, out, more):
    """Starts a training in two processes, the first of them a fork; what they print is in a log."""
    command = [*COMMAND, *f"{words} --processes 2 --out {out} {more}".split()]
    with open(f"{out}.log", "wb") as log:
        return Fork(command, ENVIRONMENT, log, log)


def ended(process, out):
    """Waits for the end; returns the exit code and what was printed."""
    return process.wait(120), Path(f"{out}.log").read_text()


@pytest.fixture
def endless(words, tmp_path):
    """A training that does not end by itself, after two steps; its processes are killed at last."""
    process = train(words, tmp_path / "run", "--steps 100000")
    wait_for_step(tmp_path / "run", 2)
    others = psutil.Process(process.pid).children(recursive=True)
    yield process, others
    process.kill()
    for each in others:
        with suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.mark.long
def test_two_processes_train_as_torchruns_do_and_as_one_does(words, tmp_path):
    words = f"{words} --steps 4"
    code, told = ended(train(words, tmp_path / "two", ""), tmp_path / "two")
    assert code == 0, told
    assert (told.count("next: gigamask evaluate"), told.count("step 4/4")) == (1, 1)
    assert '"processes": 2' in (tmp_path / "two" / "metrics.jsonl").read_text()
    fork(2, exit_code, words, f"--out {tmp_path}/torchrun")
    assert same(tmp_path / "two", tmp_path / "torchrun")
    invoke(words, f"--out {tmp_path}/one")
    one, two = ([record["loss"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "two"), str(tmp_path / "api")],
        env=ENVIRONMENT,
        check=True,
        timeout=120,
    )
    assert same(tmp_path / "api", tmp_path / "two")


@pytest.mark.long
def test_ctrl_c_saves_and_the_same_command_goes_on(words, endless, tmp_path):
    process, others = endless
    os.kill(process.pid, signal.SIGINT)
    code, told = ended(process, tmp_path / "run")
    assert code == INTERRUPTED, told
    assert "interrupted and saved" in told
    assert "Traceback" not in told
    assert not any(each.is_running() and each.status() != "zombie" for each in others)
    step = newest_step(tmp_path / "run")
    code, told = ended(train(words, tmp_path / "run", f"--steps {step + 2}"), tmp_path / "run")
    assert code == 0, told
    fork(2, exit_code, words, f"--steps {step + 2} --out {tmp_path}/whole")
    assert same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.long
def test_one_that_is_killed_ends_the_others_with_one_line(endless, tmp_path):
    process, others = endless
    [other] = [each for each in others if each.ppid() == process.pid and "-P" in each.cmdline()]
    other.kill()
    code, told = ended(process, tmp_path / "run")
    assert code == 2
    assert "process 0 of 2: another process ended" in told
    assert "run the same command again" in told
    assert "Traceback" not in told


def test_one_that_ends_before_training_is_named_at_once(capfd):
    environment = dict(ENVIRONMENT)
    with (
        error_line("process 1 of 2 ended with exit code 2 before"),
        start_world(["train", "nonsense"], 2, environment, timeout_s=60),
    ):
        raise AssertionError("the other process cannot train")
    assert "nonsense" in capfd.readouterr().err
    assert environment == ENVIRONMENT


def test_an_error_before_training_is_said_once(words, tmp_path):
    process = train(words, tmp_path / "run", f"--init {tmp_path}/nowhere --steps 4")
    code, told = ended(process, tmp_path / "run")
    assert code == 2
    assert "nowhere" in told
    assert told.count("\n") == 1, told
