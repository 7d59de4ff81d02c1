"""Several processes as docs/cluster.md has them: its torchrun line, and one that hangs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from gigamask.training import checkpoint
from tests.commands import LITTLE, exit_code, invoke
from tests.journeys.pages import DOCS, ROOT
from tests.journeys.runs import CONSTANT_LR, kill_all, newest_step, same, wait_for_step, weights
from tests.ranks import environment, fork, free_port

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}
PAGE = (DOCS / "cluster.md").read_text()


@pytest.mark.long
def test_a_process_killed_and_all_of_them_stopped_change_nothing(scenes, tmp_path):
    """torchrun starts all again when one was killed; when it is itself signaled to stop, they save,
    and the same command goes on. Bit for bit."""
    sizes = "--save-every 1 --batch-size 4 --micro-batch-size 2"
    words = " ".join([f"train {LITTLE} --data {scenes} {sizes}", *CONSTANT_LR])
    export, torchrun, *_ = re.findall(r"(?m)^    (export .*|torchrun .*)", PAGE)
    torchrun, count = re.subn(
        r"--nproc-per-node 8 (.*) train sam_vit_b --data /sa1b --init \S+ --out \S+",
        rf"--nproc-per-node 2 \1 {words} --steps 100000 --out {tmp_path / 'run'}",
        torchrun,
    )
    assert count == 1
    disturbed = subprocess.Popen(
        ["bash", "-c", f"{export}\nexec {torchrun}"],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        at = wait_for_step(tmp_path / "run", 2)
        killed = psutil.Process(disturbed.pid).children()[1]
        killed.kill()
        wait_for_step(tmp_path / "run", at + 3)
        assert not killed.is_running()
        disturbed.terminate()
        said = disturbed.communicate(timeout=150)[1]
    finally:
        kill_all(disturbed)
    assert "another process ended or did not answer" in said
    steps = newest_step(tmp_path / "run") + 2
    for out in ("run", "whole"):
        fork(2, exit_code, words, f"--steps {steps} --out {tmp_path}/{out}")
    assert newest_step(tmp_path / "run") == steps
    assert same(tmp_path / "run", tmp_path / "whole")


HANGING = """
import os, sys, time
from gigamask.cli.main import main
from gigamask.training.logging import MetricsLogger
if os.environ["RANK"] == "1":
    log_step = MetricsLogger.log_step
    def hang(self, step, *given):
        log_step(self, step, *given)
        if step == 3:
            time.sleep(1000)
    MetricsLogger.log_step = hang
sys.exit(main(sys.argv[1:]))
"""


def both(*words: str) -> list[subprocess.Popen]:
    """Starts two processes as torchrun does, without anybody who restarts them."""
    port = free_port()
    return [
        subprocess.Popen(
            words,
            env={**ENVIRONMENT, **environment(rank, 2, port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


@pytest.mark.long
def test_one_that_hangs_is_given_up_and_the_run_goes_on(scenes, tmp_path):
    """The other process stops with an error, both print their stacks; the same command alone ends
    as if nothing had been, up to rounding."""
    words = (
        f"train {LITTLE} --data {scenes} --steps 6 --save-every 1 "
        "--timeout-s 6 --batch-size 4 --micro-batch-size 2"
    )
    hanging = both(sys.executable, "-c", HANGING, *words.split(), "--out", str(tmp_path / "run"))
    try:
        said = hanging[0].communicate(timeout=60)[1]
        assert hanging[0].returncode == 2
        assert re.search(
            r"(?m)^gigamask: process 0 of 2: another process .*\(.*\); run the same command", said
        )
        hanging[1].kill()
        told = hanging[1].communicate()[1]
    finally:
        for process in hanging:
            process.kill()
    assert "in meet\n" in said, "it stands before the save that waits for no clock"
    assert "in hang\n" in told, "the hanging one stands where it hangs"
    assert checkpoint.newest(tmp_path / "run").name == "step_00000002"
    for out in ("run", "whole"):
        invoke(words, f"--out {tmp_path}/{out}")
    ours, theirs = (weights(tmp_path / out) for out in ("run", "whole"))
    assert all(np.allclose(ours[name], theirs[name], atol=2e-4) for name in theirs)
