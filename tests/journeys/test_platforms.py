"""Commands on a system that lacks what only Unix has."""

import subprocess
import sys
from pathlib import Path

import pytest

LITTLE = f"{Path(__file__).resolve().parents[1] / 'little.py'}:little"
WITHOUT_UNIX = """
import multiprocessing.reduction, multiprocessing.util, os, pathlib, signal, subprocess, sys
import cv2, faster_coco_eval, filelock, fsspec, psutil, torch, torch.utils.data, torch._dynamo
for name in ("fcntl", "resource", "pwd", "grp", "termios", "posix", "syslog", "tty", "pty"):
    sys.modules[name] = None
for module, names in {
    os: ("pread", "posix_fadvise", "O_NONBLOCK", "sched_getaffinity", "getuid", "killpg", "fork"),
    signal: ("pthread_sigmask", "SIGKILL", "SIGHUP"),
}.items():
    for name in names:
        delattr(module, name)
filelock.FileLock = filelock.SoftFileLock
from gigamask.cli.main import main
scenes, out, little = sys.argv[1:]
run = out + "/run"
flags = ["--steps", "2", "--evaluation.data", scenes, "--evaluation.images", "2"]
assert main(["train", little, "--data", scenes, "--out", run, *flags, "--processes", "1"]) == 0
assert main(["train", "--resume", run, "--steps", "3"]) == 0
assert main(["evaluate", run, "--data", scenes, "--max-images", "2", "--trust"]) == 0
assert main(["export", run, "--to", "safetensors", "--out", out + "/a.safetensors", "--trust"]) == 0
assert main(["report", run]) == 0
"""


STARTED_OTHERWISE = """
import multiprocessing, sys
if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    from gigamask.cli.main import main
    scenes, run, little = sys.argv[1:]
    flags = ["--steps", "1", "--loader.workers", "1"]
    assert main(["train", little, "--data", scenes, "--out", run, *flags]) == 0
"""


@pytest.mark.long
def test_loader_processes_need_not_be_forked(scenes, tmp_path):
    """Python 3.14 starts processes by a server, macOS and Windows start new interpreters."""
    (tmp_path / "start.py").write_text(STARTED_OTHERWISE)
    words = ["start.py", str(scenes), str(tmp_path / "run"), LITTLE]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_training_needs_nothing_that_only_unix_has(scenes, tmp_path):
    """The modules and functions that Windows lacks are removed before gigamask is imported."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_UNIX, str(scenes), str(tmp_path), LITTLE],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "report.html").is_file()
