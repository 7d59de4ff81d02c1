"""Several processes, as a training on several GPUs has them, that meet over gloo."""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """Returns a port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Returns the environment that torchrun gives a process."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return {
        **own,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def fork(count: int, act: Callable[..., object], *given: Any, timeout_s: float = 120) -> None:
    """Call a function in `count` forked processes, and fail if one of them fails."""
    port = free_port()

    def play(rank: int) -> None:
        os.environ.update(environment(rank, count, port))
        sys.exit(act(*given))

    processes = [
        multiprocessing.get_context("fork").Process(target=play, args=(rank,))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * count


def launch(count: int, script: str, *words: str, timeout_s: float = 120) -> None:
    """Run Python code in `count` processes under torchrun; fail with their output if one fails."""
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(count),
        "--no-python",
        sys.executable,
        "-c",
        script,
    ]
    around = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [*run, *words], env=around, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
