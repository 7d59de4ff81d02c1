"""Several processes under torchrun, as a training on several GPUs has them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def launch(count: int, *words: str, timeout_s: float = 120) -> None:
    """Runs a command in so many processes that meet over gloo, and fails with what they said when one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--no-python", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def launch_python(count: int, script: str, *words: str, timeout_s: float = 120) -> None:
    """Runs a line of Python so."""
    launch(count, sys.executable, "-c", script, *words, timeout_s=timeout_s)
