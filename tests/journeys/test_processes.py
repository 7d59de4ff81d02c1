"""Training in several processes of one machine, which the command or the Python API starts."""

import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from gigamask.cli.main import INTERRUPTED, main
from gigamask.distributed.local_processes import start_world
from gigamask.errors import GigamaskError
from gigamask.training import checkpoint
from tests.journeys.runs import CONSTANT_LR, records, same
from tests.journeys.test_cluster import ENVIRONMENT, LITTLE, reached
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
    sizes = "--batch-size 4 --micro-batch-size 2 --save-every 1".split()
    return ["train", LITTLE, "--data", str(scenes), *sizes, *CONSTANT_LR]


def train(words, out, *more):
    """Starts a training in two processes."""
    command = [sys.executable, "-m", "gigamask", *words, "--processes", "2", "--out", str(out)]
    return subprocess.Popen(
        [*command, *more],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def endless(words, tmp_path):
    """A training that does not end by itself, after two steps; its processes are killed at last."""
    process = train(words, tmp_path / "run", "--steps", "100000")
    reached(tmp_path / "run", 2)
    others = psutil.Process(process.pid).children(recursive=True)
    yield process, others
    process.kill()
    for each in others:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def test_two_processes_train_as_torchruns_do_and_as_one_does(words, tmp_path):
    steps = ["--steps", "4"]
    done = train(words, tmp_path / "two", *steps)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert (out.count("next: gigamask evaluate"), err.count("step 4/4")) == (1, 1)
    assert '"processes": 2' in (tmp_path / "two" / "metrics.jsonl").read_text()
    fork(2, main, [*words, *steps, "--out", str(tmp_path / "torchrun")])
    assert same(tmp_path / "two", tmp_path / "torchrun")
    assert main([*words, *steps, "--out", str(tmp_path / "one")]) == 0
    one, two = ([record["loss"] for record in records(tmp_path / name)] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "two"), str(tmp_path / "api")],
        env=ENVIRONMENT,
        check=True,
        timeout=120,
    )
    assert same(tmp_path / "api", tmp_path / "two")


def test_ctrl_c_saves_and_the_same_command_goes_on(words, endless, tmp_path):
    process, others = endless
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, err
    assert "interrupted and saved" in out
    assert "Traceback" not in err
    assert not any(each.is_running() and each.status() != "zombie" for each in others)
    step = int(checkpoint.newest(tmp_path / "run").name[-8:])
    for name in ("run", "whole"):
        resumed = train(words, tmp_path / name, "--steps", str(step + 2))
        _, err = resumed.communicate(timeout=120)
        assert resumed.returncode == 0, err
    assert same(tmp_path / "run", tmp_path / "whole")


def test_one_that_is_killed_ends_the_others_with_one_line(endless, tmp_path):
    process, others = endless
    [other] = [each for each in others if each.ppid() == process.pid and "-P" in each.cmdline()]
    other.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "process 0 of 2: another process ended" in err
    assert "run the same command again" in err
    assert "Traceback" not in err


def test_one_that_ends_before_training_is_named_at_once(capfd):
    environment = dict(ENVIRONMENT)
    with (
        pytest.raises(GigamaskError, match="process 1 of 2 ended with exit code 2 before"),
        start_world(["train", "nonsense"], 2, environment, timeout_s=60),
    ):
        raise AssertionError("the other process cannot train")
    assert "nonsense" in capfd.readouterr().err
    assert environment == ENVIRONMENT


def test_an_error_before_training_is_said_once(words, tmp_path):
    done = train(words, tmp_path / "run", "--init", str(tmp_path / "nowhere"), "--steps", "4")
    _, err = done.communicate(timeout=60)
    assert done.returncode == 2
    assert "nowhere" in err
    assert err.count("\n") == 1, err
