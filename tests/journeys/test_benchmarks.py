"""Benchmarks that wait for a GPU run to their end on a CPU, so that a GPU's hour does not begin
with mending them; and kernels of compiled graphs are counted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_all
from benchmarks.gpu_all import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    *(small.removeprefix("benchmarks.") for _, small in COMMANDS if small),
    "grounding --scenes 3 --steps 2",
    "dependencies",
    "peers_learning --seconds 1 --seeds 1 --images 1",
    "count_step --size tiny --masks 2",
    "many_ranks --recipe tiny --machines 2 --images 5000",
]
SCRIPT = """
import runpy, sys
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    print("#", line, flush=True)
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.exhaustive
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
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = [part.splitlines()[1:] for part in done.stdout.split("# ")[1:]]
    assert [len(lines) > 2 for lines in told] == [True] * len(LINES), done.stdout


@pytest.mark.long
def test_all_that_a_gpu_has_to_show_is_run_and_what_fails_is_named(monkeypatch, capsys, tmp_path):
    commands = (("x", "platform"), ("y", None), ("z", "json.tool nothing"), ("w", "http.server 0"))
    monkeypatch.setattr(gpu_all, "COMMANDS", commands)
    out = tmp_path / "all.md"
    words = f"gpu_all --device cpu --minutes 0.1 --out {out}".split()
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as exited:
        gpu_all.main()
    assert exited.value.code == 1
    told = capsys.readouterr().out
    assert told == out.read_text()
    table = told[told.index("| command") :].splitlines()
    assert [row.split(" | ")[2] for row in table[2:]] == [
        "done |",
        "**exit code 2** |",
        "stopped: no time left |",
    ]


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_kernels_of_a_compiled_graph_are_counted_without_a_gpu():
    from benchmarks.count_compiled import CompiledCounter, counting_backend, gpu_to_schedule_for

    torch.compiler.reset()
    counter = CompiledCounter(256)

    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (2 * x.sin() + 1) @ weight

    compiled = torch.compile(compute, backend=counting_backend(counter))
    x, weight = torch.rand(64, 32), torch.rand(32, 16)
    with gpu_to_schedule_for():
        found = compiled(x, weight)
    assert torch.equal(found, compute(x, weight))
    total = counter.counts.count()
    assert total.launches == 2  # one for the sine and what follows it, one for the product
    assert total.bytes == 4 * (2 * x.numel() + x.numel() + weight.numel() + found.numel())
