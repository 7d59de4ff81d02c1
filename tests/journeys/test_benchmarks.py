"""Benchmarks that wait for a GPU run to their end on a CPU, so that a GPU's hour does not begin
with mending them.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    "gpu_step --size tiny --masks 2 --levers none activation_checkpointing=1,optimizer=adamw8bit "
    "--repeats 1",
    "plain_loops --size tiny --masks 2 --rounds 4 --repeats 1",
    "plan --sizes tiny --masks 1",
    "attention --tokens 4 --heads 1 --dim 8 --repeats 1",
    "evaluate --images 1 --repeats 1 --batch-size 2",
    "grounding --scenes 3 --steps 2",
    "decoder_round --masks 1 --side 2 --repeats 1 --float32",
    "dependencies",
    "count_step --size tiny --masks 2",
]
SCRIPT = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    print("#", line, flush=True)
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
"""


def test_they_run():
    """All in one process, which imports torch once; types are not checked at run time there, which
    would take longer than they do."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(LINES),
        env=environment,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = [part.splitlines()[1:] for part in done.stdout.split("# ")[1:]]
    assert [len(lines) > 2 for lines in told] == [True] * len(LINES), done.stdout
