"""`--submit slurm` with Slurm's commands played on this machine, and `--submit local`."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.commands import LITTLE, invoke, refusal
from tests.forked import COMMAND, Fork, forked  # noqa: F401 (a fixture)
from tests.journeys.runs import CONSTANT_LR, newest_step, same, wait_for_step, wait_until
from tests.plugins.cluster import fake_slurm

MORE = ["--steps", "40", *CONSTANT_LR, "--device", "cpu"]


def words(scenes: Path, out: str, *more: str) -> list[str]:
    return [*f"train {LITTLE} --data {scenes} --save-every 1 --out".split(), out, *more]


def child_of(pid: int) -> int:
    return psutil.Process(pid).children()[0].pid


@pytest.fixture(scope="module")
def undisturbed(scenes, tmp_path_factory):
    """The folder of a training that nothing stopped."""
    out = tmp_path_factory.mktemp("undisturbed")
    invoke(*words(scenes, str(out), *MORE))
    return out


@pytest.mark.long
@pytest.mark.parametrize("cause", ["time limit", "preemption"])
def test_a_training_on_slurm_is_requeued_and_ends_as_if_never_stopped(
    cause, scenes, slurm, undisturbed, capsys
):
    flags = "--submit slurm --submit-gpus 0 --submit-time 1:00:00".split()
    flags += "--submit-partition a100 --submit-sbatch account=vision".split()
    invoke(*words(scenes, "run", *MORE, *flags))
    assert "job 100: 1 x 1 processes" in capsys.readouterr().out
    wait_for_step(Path("run"), 2)
    shell = int((slurm / "100.pid").read_text())
    if cause == "time limit":
        os.kill(shell, signal.SIGUSR1)
    else:  # Slurm signals the step alone
        (slurm / "100.preempted").touch()
        subprocess.run(["scancel", "--signal=TERM", "100.0"], check=True)
    wait_until(lambda: (slurm / "100.requeued").exists())
    wait_until(lambda: not (slurm / "100.queued").exists())
    assert newest_step(Path("run")) == 40
    (log,) = Path("submitted").glob("train-*/100.log")
    assert "it is requeued and continues" in log.read_text()
    assert "interrupted and saved at step" in log.read_text()
    script = (slurm / "100.sh").read_text()
    assert 'SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"' in script
    options = fake_slurm.options_of(script)
    assert (options["partition"], options["account"]) == ("a100", "vision")
    assert (options["time"], options["signal"]) == ("1:00:00", "B:USR1@300")
    assert same(Path("run"), undisturbed)


@pytest.mark.long
def test_a_job_that_fails_is_not_requeued(scenes, slurm, capsys):
    invoke(*words(scenes, "run", "--submit", "slurm", "--submit-gpus", "0"))
    wait_until(lambda: (slurm / "100.pid").exists())
    wait_for_step(Path("run"), 1)
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
    wait_for_step(Path("run"), 2)
    os.kill(child_of(submitted.pid), signal.SIGKILL)
    assert submitted.wait(90) == 0
    assert newest_step(Path("run")) == 40
    assert same(Path("run"), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags, jobs", [("--config cluster.yaml", 1), ("--submit local --submit-gpus 2", 0)]
)
def test_two_processes_and_flags_in_a_file(flags, jobs, scenes, slurm):
    """The job does not submit itself again, although the file is among its flags."""
    Path("cluster.yaml").write_text("submit: slurm\nsubmit-nodes: 2\nsubmit-gpus: 1\n")
    more = "--steps 2 --batch-size 2 --micro-batch-size 1 --device cpu"
    invoke(*words(scenes, "run", more, flags))
    wait_until(lambda: not (slurm / "100.queued").exists())
    assert newest_step(Path("run")) == 2
    assert len(list(slurm.glob("*.sh"))) == jobs


@pytest.mark.long
@pytest.mark.parametrize("where", ["local", "slurm"])
def test_a_training_whose_minutes_are_over_is_not_started_again(where, scenes, slurm):
    """Neither by torchrun nor by the command, although steps remain."""
    more = f"--device cpu --max-minutes 0 --submit {where} --submit-gpus 2"
    invoke(*words(scenes, "run", *MORE, more))
    wait_until(lambda: not (slurm / "100.queued").exists())
    states = [path.read_text() for path in slurm.glob("100.state")]
    assert states == ["COMPLETED|0:0"] * (where == "slurm")
    assert newest_step(Path("run")) == 1


def test_a_refused_job_gives_slurms_reason_and_without_slurm_one_line_says_what_else_runs(
    scenes, slurm, tmp_path, monkeypatch, capsys
):
    (slurm / "sbatch").write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    submitted = words(scenes, "run", "--submit", "slurm")
    assert "invalid partition" in refusal(capsys, *submitted)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sbatch: not found" in refusal(capsys, *submitted)


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
