"""Trainings in containers: little shared memory, few file handles, a full disk for TensorBoard."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import LITTLE, invoke

GIGAMASK = Path(sys.executable).parent / "gigamask"


def may_mount() -> bool:
    """Returns whether this process may mount a small file system that only it sees."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def train(before: str, words: str) -> subprocess.CompletedProcess:
    """Trains after a command of the shell has set the limits."""
    command = f"{shlex.quote(str(GIGAMASK))} train {words} --steps 3 --loader.workers 2"
    own = ["unshare", "-m"] if "mount" in before else []
    return subprocess.run(
        [*own, "sh", "-c", f"{before} && {command}"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.long
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_shared_memory_of_128_kilobytes(scenes, tmp_path):
    """One line says what to do, and the same command with it trains."""
    small = "mount -t tmpfs -o size=128k tmpfs /dev/shm"
    words = f"{LITTLE} --data {scenes} --out {tmp_path}/run"
    done = train(small, words)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert last.startswith("gigamask: /dev/shm: has no room for the ")
    assert "Traceback" not in done.stderr
    invoke(f"train {words} --steps 3 --loader.workers 0")


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--processes 2"])
def test_48_file_handles(scenes, tmp_path, flags):
    done = train("ulimit -n 48", f"{LITTLE} --data {scenes} --out {tmp_path}/run {flags}")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.skipif(not may_mount(), reason="needs the right to mount a file system")
def test_a_full_disk_for_tensorboard_stops_only_that(scenes, tmp_path):
    board, run = tmp_path / "run" / "tensorboard", tmp_path / "run"
    board.mkdir(parents=True)
    full = f"mount -t tmpfs -o size=4k tmpfs {board} && head -c 4096 /dev/zero > {board}/other"
    done = train(full, f"{LITTLE} --data {scenes} --out {run} --log-every 1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TensorBoardTracker stopped: No space left on device") == 1
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]


def test_epochs_across_resumes(scenes, tmp_path, capsys):
    """Epochs count from the start of the run, not from where it resumes."""
    words = f"train {LITTLE} --data {scenes} --out {tmp_path}/run --loader.workers 0".split()
    steps = []
    for given in (
        [*words, "--epochs", "1"],
        *[["train", "--resume", words[5], "--epochs", "2"]] * 2,
    ):
        invoke(*given, f"--json {tmp_path}/told.json")
        steps.append(json.loads((tmp_path / "told.json").read_text())["step"])
    assert steps == [steps[0], 2 * steps[0], 2 * steps[0]]
