"""`--submit slurm` with Slurm's commands played on this machine, and `--submit local`."""

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from gigamask.models import manifest
from gigamask.training import checkpoint
from tests.commands import invoke, refusal
from tests.forked import COMMAND, Fork, forked  # noqa: F401 (a fixture)
from tests.journeys.runs import CONSTANT_LR
from tests.plugins.cluster import fake_slurm

ROOT = Path(__file__).resolve().parents[4]
MORE = ["--steps", "40", *CONSTANT_LR, "--device", "cpu"]
LITTLE = f"{ROOT / 'tests' / 'little.py'}:little"


def words(scenes: Path, out: str, *more: str) -> list[str]:
    return [*f"train {LITTLE} --data {scenes} --save-every 1 --out".split(), out, *more]


def wait_until(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


def child_of(pid: int) -> int:
    return psutil.Process(pid).children()[0].pid


def saved_step(out: Path) -> int:
    found = manifest.list_checkpoints(out / "checkpoints")
    return int(found[-1].name[-8:]) if found else 0


def weights(out: Path) -> dict[str, np.ndarray]:
    return load_file(checkpoint.newest(out) / checkpoint.MODEL)


@pytest.fixture(scope="module")
def undisturbed(scenes, tmp_path_factory):
    """Weights of a training that nothing stopped."""
    out = tmp_path_factory.mktemp("undisturbed")
    invoke(*words(scenes, str(out), *MORE))
    return weights(out)


@pytest.mark.long
@pytest.mark.parametrize("cause", ["time limit", "preemption"])
def test_a_training_on_slurm_is_requeued_and_ends_as_if_never_stopped(
    cause, scenes, slurm, undisturbed, capsys
):
    flags = "--submit slurm --submit-gpus 0 --submit-time 1:00:00".split()
    flags += "--submit-partition a100 --submit-sbatch account=vision".split()
    invoke(*words(scenes, "run", *MORE, *flags))
    assert "job 100: 1 x 1 processes" in capsys.readouterr().out
    wait_until(lambda: saved_step(Path("run")) >= 2)
    shell = int((slurm / "100.pid").read_text())
    if cause == "time limit":
        os.kill(shell, signal.SIGUSR1)
    else:  # Slurm signals the step alone
        (slurm / "100.preempted").touch()
        os.kill(child_of(shell), signal.SIGTERM)
    wait_until(lambda: (slurm / "100.requeued").exists())
    wait_until(lambda: not (slurm / "100.queued").exists())
    assert saved_step(Path("run")) == 40
    (log,) = Path("submitted").glob("train-*/100.log")
    assert "it is requeued and continues" in log.read_text()
    script = (slurm / "100.sh").read_text()
    options = fake_slurm.options_of(script)
    assert (options["partition"], options["account"]) == ("a100", "vision")
    assert (options["time"], options["signal"]) == ("1:00:00", "B:USR1@300")
    np.testing.assert_equal(weights(Path("run")), undisturbed)


@pytest.mark.long
def test_a_job_that_fails_is_not_requeued(scenes, slurm, capsys):
    invoke(*words(scenes, "run", "--submit", "slurm", "--submit-gpus", "0"))
    wait_until(lambda: (slurm / "100.pid").exists())
    wait_until(lambda: saved_step(Path("run")) >= 1)
    step = psutil.Process(child_of(int((slurm / "100.pid").read_text())))
    for process in (step, *step.children(recursive=True)):  # as Slurm does
        process.kill()
    wait_until(lambda: not (slurm / "100.queued").exists())
    assert (slurm / "100.state").read_text().startswith("FAILED")
    assert not (slurm / "100.requeue").exists()


@pytest.mark.long
@pytest.mark.usefixtures("forked")
def test_a_local_training_that_is_killed_goes_on(scenes, slurm, undisturbed):
    """The command that submitted it starts it again."""
    command = [*COMMAND, *words(scenes, "run", *MORE, "--submit", "local")]
    submitted = Fork(command, os.environ)
    wait_until(lambda: saved_step(Path("run")) >= 2)
    os.kill(child_of(submitted.pid), signal.SIGKILL)
    assert submitted.wait(90) == 0
    assert saved_step(Path("run")) == 40
    np.testing.assert_equal(weights(Path("run")), undisturbed)


@pytest.mark.long
def test_two_machines_and_flags_in_a_file(scenes, slurm):
    """The job does not submit itself again, although the file is among its flags."""
    Path("cluster.yaml").write_text("submit: slurm\nsubmit-nodes: 2\nsubmit-gpus: 1\n")
    more = "--steps 2 --batch-size 2 --micro-batch-size 1 --device cpu".split()
    invoke(*words(scenes, "run", *more, "--config", "cluster.yaml"))
    wait_until(lambda: not (slurm / "100.queued").exists())
    assert saved_step(Path("run")) == 2
    assert len(list(slurm.glob("*.sh"))) == 1


@pytest.mark.long
def test_a_local_training_on_two_processes(scenes, slurm):
    two = "--submit local --submit-gpus 2 --device cpu --micro-batch-size 1".split()
    invoke(*words(scenes, "run", "--steps", "2", "--batch-size", "2", *two))
    assert saved_step(Path("run")) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("local --submit-nodes 2", "--submit local has one machine"),
        ("slurm --submit-time 'a day'", "--submit-time must be one word"),
        ("slurm --submit-time soon", "--submit-time must be minutes"),
        ("slurm --submit-gpus -1", "--submit-gpus is -1"),
        ("slurm --submit-sbatch --account=x", "--account"),
        ("slurm --submit-folder 'a b'", "cannot write logs"),
        ("pbs", "--submit must be one of none, local, slurm"),
    ],
)
def test_wrong_flags_give_one_line(flags, message, scenes, slurm, capsys):
    assert message in refusal(capsys, *words(scenes, "run", "--submit", flags))
    assert not list(slurm.glob("*.sh"))


def test_without_slurm_one_line_says_what_else_runs(scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch: not found" in refusal(capsys, *words(scenes, "run", "--submit", "slurm"))


def test_a_refused_job_gives_slurms_reason(scenes, slurm, capsys):
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    assert "invalid partition" in refusal(capsys, *words(scenes, "run", "--submit", "slurm"))


def test_a_container_and_several_machines_are_in_the_script(scenes, slurm):
    (slurm / "sbatch").write_text("#!/bin/bash\necho 7\n")
    flags = "--submit slurm --submit-container docker://gigamask --submit-mounts /sa1b "
    flags += "--submit-nodes 4 --submit-gpus 8"
    invoke(*words(scenes, "run", flags))
    (script,) = Path("submitted").glob("*/job.sh")
    text = script.read_text()
    assert fake_slurm.options_of(text)["nodes"] == "4"
    assert "--container-image=docker://gigamask" in text
    assert ",/sa1b:/sa1b " in text
    assert "--nproc-per-node 8" in text
    assert "export PATH" not in text
    assert subprocess.run(["bash", "-n", script]).returncode == 0
