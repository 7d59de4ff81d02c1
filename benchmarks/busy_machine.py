"""Train `tiny` on an idle machine and beside two busy processes, in processes and in threads.

Seconds of `gigamask train tiny --steps 60`, start included, by setting. A fair share of two cores
beside two busy processes is half of them. Prints Markdown.

Run: python benchmarks/busy_machine.py [--steps 60] [--recipe tiny]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from gigamask.data import index
from gigamask.synthetic import scenes

SETTINGS = {
    "default: processes of one thread": {},
    "one process of one thread": {"OMP_NUM_THREADS": "1"},
    "two threads that spin": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"},
    "two threads, `GOMP_SPINCOUNT=20000`": {"OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "20000"},
    "two threads that sleep": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
}
BUSY, TIMEOUT_S = 2, 1200


def train_s(folder: Path, recipe: str, steps: int, changes: dict[str, str], busy: int) -> float:
    """Return the seconds of a training, infinity after `TIMEOUT_S`.

    Args:
        folder: Folder of the data; runs are written to it.
        recipe: The recipe.
        steps: Number of steps.
        changes: Environment variables to set; those of OpenMP that are not in it are removed.
        busy: Number of processes that compute meanwhile.
    """
    kept = {name: value for name, value in os.environ.items() if "OMP" not in name}
    words = ["train", recipe, "--data", str(folder / "data"), "--steps", str(steps)]
    with ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        for _ in range(busy):
            process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(process.wait)
            stack.callback(process.kill)
        start_s = time.perf_counter()
        try:
            subprocess.run(
                [sys.executable, "-m", "gigamask", *words, "--out", f"{out}/run"],
                env=kept | changes,
                check=True,
                capture_output=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return float("inf")
        return time.perf_counter() - start_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes.write(str(folder / "data"), 64, seed=0)
        index.build(folder / "data", folder / "data" / "index")
        print(f"| setting | idle, s | beside {BUSY} busy processes, s |\n|---|---|---|", flush=True)
        for setting, changes in SETTINGS.items():
            seconds = [
                train_s(folder, given.recipe, given.steps, changes, busy) for busy in (0, BUSY)
            ]
            print(f"| {setting} | {seconds[0]:.0f} | {seconds[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
