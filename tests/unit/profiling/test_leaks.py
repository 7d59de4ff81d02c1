"""Memory that grows for good, on looks that are made up and on trainings that are real."""

import os
import subprocess
import sys
from collections import Counter
from math import exp, log, sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

from gigamask.data import process_memory
from gigamask.profiling import leaks
from gigamask.profiling.leaks import Leaks, MemorySeries

CPU = torch.device("cpu")
MB = 10**6
HELD = 500 * MB


def found(size, last, every=10):
    """Returns the step at which memory of `size(step)` bytes above `HELD` is called a leak, with
    what is said of it."""
    series = MemorySeries()
    for step in range(every, last + 1, every):
        if grows := series.add(step, int(HELD + size(step))):
            return step, grows
    return None


def noise(step):
    return 20 * MB * float(np.random.default_rng(step).standard_normal())


QUIET = {
    "level": lambda step: 0,
    "looks that vary": noise,
    "one jump": lambda step: 300 * MB * (step > 400),
    "jumps ever more rarely": lambda step: 40 * MB * int(log(step)),
    "a heap that fragments": lambda step: 100 * MB * log(step),
    "a square root": lambda step: 10 * MB * sqrt(step),
    "a cache that fills within 200 steps": lambda step: 2000 * MB * min(step / 200, 1),
    "a cache that fills ever more slowly": lambda step: 1000 * MB * (1 - exp(-step / 400)),
    "a small one that fills for long": lambda step: 60 * MB * min(step / 10_000, 1),
    "less than a page a step": lambda step: 4000 * step,
    "epochs": lambda step: 200 * MB * (step % 500) / 500,
}


@pytest.mark.parametrize("what", QUIET)
def test_what_does_not_grow_for_good_is_no_leak(what):
    assert found(QUIET[what], 20_000) is None


@pytest.mark.slow
def test_allocators_at_random_are_no_leaks():
    for seed in range(10):
        steps = np.cumsum(np.random.default_rng(seed).standard_normal(1000)) * 5 * MB
        assert found(lambda step, steps=steps: steps[step // 10 - 1], 10_000) is None, seed


@pytest.mark.parametrize(
    "size, bytes_per_step, latest",
    [
        (lambda step: 2 * MB * step, 2 * MB, 600),
        (lambda step: 0.3 * MB * step, 0.3 * MB, 1000),
        (lambda step: 0.1 * MB * step, 0.1 * MB, 2000),
        (lambda step: 0.1 * MB * step + noise(step), 0.1 * MB, 5000),
        (lambda step: 0.4 * MB * step + 300 * MB * (step > 60), 0.4 * MB, 1500),
        (lambda step: 30 * MB * (step // 300), 0.1 * MB, 8000),
        (lambda step: 0.01 * MB * step, 0.01 * MB, 20_000),
    ],
)
def test_leaks_are_found_with_what_a_step_adds(size, bytes_per_step, latest):
    step, grows = found(size, latest)
    assert grows.bytes_per_step == pytest.approx(bytes_per_step, rel=0.1)
    assert grows.held >= HELD + size(step) - 100 * MB
    assert 0 < grows.since < step / 4


def test_looks_are_few_however_long_a_training_is():
    series = MemorySeries()
    for step in range(1, 10_001):
        series.add(step, HELD)
    assert leaks.MAX_SAMPLES / 2 <= len(series.steps) == len(series.sizes) < leaks.MAX_SAMPLES
    assert set(np.diff(series.steps)) == {16}


def watched(monkeypatch, sizes, steps=800, device=CPU, last=1000, every=10):
    """Returns the lines and notes of a training.

    `sizes(step)` returns this process's bytes, the GPU's and those of loader processes.
    """
    looks, now, told = Counter(), {}, []
    monkeypatch.setattr(
        process_memory, "in_use_bytes", lambda: looks.update(["all"]) or now.get("this process")
    )
    monkeypatch.setattr(
        process_memory,
        "workers_allocated_bytes",
        lambda: {pid: size for pid, size in now.items() if isinstance(pid, int)},
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: now["the GPU"])
    meter = Leaks(every, last, device)
    for step in range(steps + 1):
        now = sizes(step)
        told += meter.observe(step, False)
    assert list(meter.observe(steps, True)) == []
    assert looks["all"] == steps // every
    return told


def test_a_leak_is_said_once_with_where_it_leads(monkeypatch):
    ((line, noted),) = watched(monkeypatch, lambda step: {"this process": HELD + MB * step})
    assert line == (
        "memory leak: this process holds 1.03 GB, 1.0 MB more with every step since step 70, "
        "470.0 MB more in the 470 remaining steps; "
        "--profile 5 lists the tensors that remain (docs/profile.md)"
    )
    assert noted == {
        "leak": "this process",
        "bytes": HELD + 530 * MB,
        "bytes_per_step": MB,
        "since": 70,
    }


def test_at_the_end_nothing_is_left_to_come(monkeypatch):
    ((line, _),) = watched(
        monkeypatch, lambda step: {"this process": HELD + MB * step}, steps=530, last=530
    )
    assert "1.0 MB more with every step since step 70; --profile 5" in line


def test_kinds_of_memory_are_distinguished_and_loader_processes_summed(monkeypatch):
    def sizes(step):
        return {
            "this process": HELD,
            "the GPU": HELD + MB * step,
            7: HELD + 2 * MB * step,
            8: HELD,
            9: HELD + 3 * MB * step,
        }

    told = watched(monkeypatch, sizes, device=torch.device("cuda:0"))
    assert Counter(noted["leak"] for _, noted in told) == {"the GPU": 1, "a loader process": 1}
    assert {noted["bytes_per_step"] for _, noted in told} == {MB, 2 * MB}


def test_a_system_that_says_nothing_has_no_leaks(monkeypatch):
    assert watched(monkeypatch, lambda step: {}) == []


@pytest.mark.long
@pytest.mark.skipif(not process_memory.PROC.is_dir(), reason="this system has no /proc")
def test_a_task_that_keeps_its_embeddings_is_found_and_the_same_task_without_is_not(
    scenes, tmp_path
):
    """In a process of its own: one full of tests takes from memory it has."""
    here = Path(__file__).resolve()
    script = (
        f"import runpy, sys; runpy.run_path({str(here.parents[2] / 'leaky.py')!r}"
        f")['main'](*sys.argv[1:])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", script, scenes, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    quiet, leaking = (line for line in done.stdout.splitlines() if line.startswith("["))
    assert quiet == "[]"
    assert "'leak': 'this process'" in leaking
    assert leaking.count("'leak'") == 1
