"""Measure the overhead of profiling a training, of its profiler ranges and of leak detection.

Recipe tiny on synthetic scenes, loaded in the process, one thread, CPU time. The last table
compares three steps in our trace and in torch's own.

Run: python benchmarks/profiling.py [--steps 40]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import gzip
import multiprocessing
import statistics
import tempfile
import time
import timeit
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gigamask.data import process_memory
from gigamask.distributed.profile_ranges import profile_range
from gigamask.profiling import timeline
from gigamask.profiling.leaks import MAX_SAMPLES, Leaks
from gigamask.profiling.profiler import WARM_UP, Profile
from gigamask.recipes import tiny
from gigamask.synthetic import scenes
from gigamask.training.trainer import train

CPU, PROFILED, BEFORE = torch.device("cpu"), 5, 10


def run_in(folder: Path, name: str, steps: int):
    """Returns the recipe, loading in this process and saving at the end alone."""
    base = tiny()
    loading = replace(base.loader, workers=0)
    return replace(
        base,
        data=(str(folder / "data"),),
        out=str(folder / name),
        steps=steps,
        save_every=steps,
        loader=loading,
    )


def profiled(folder: Path, steps: int) -> None:
    """Prints the CPU time of steps that are profiled and of those that are not, and of writing the
    files."""
    ends, begins, look = (
        [],
        [],
        Profile(folder / "profile", PROFILED, BEFORE - WARM_UP, steps, CPU).observe,
    )
    quiet = [
        lambda done, over: ends.append(time.process_time()) or (),
        lambda done, over: look(done, over) if done >= BEFORE - WARM_UP else (),
        lambda done, over: begins.append(time.process_time()) or (),
    ]
    train(run_in(folder, "run", steps), make_observers=lambda done, device: quiet)
    took = [1e3 * (end - begin) for begin, end in zip(begins, ends[1:], strict=False)]
    recorded, plain = (
        statistics.median(took[BEFORE : BEFORE + PROFILED]),
        statistics.median([*took[WARM_UP:BEFORE], *took[BEFORE + PROFILED : -1]]),
    )
    wrote = begins[BEFORE + PROFILED] - ends[BEFORE + PROFILED]
    size = (folder / "profile" / "trace.json.gz").stat().st_size
    print(
        f"a step, not profiled {plain:.0f} ms, profiled {recorded:.0f} ms ({recorded / plain:.2f}x)"
    )
    print(f"to write the files of {PROFILED} steps {wrote:.1f} s; the trace {size / 1e6:.1f} MB")
    marks(folder, plain)
    watch(plain)


def marks(folder: Path, plain: float) -> None:
    """Prints what marks cost a step in which nobody records."""
    parts, _ = timeline.read(unzipped(folder / "profile" / "trace.json.gz"), PROFILED)
    count = sum(
        part.times for part in parts if part.name not in (timeline.REST, timeline.OPTIMIZER)
    )

    def empty() -> None:
        with profile_range("encode"):
            pass

    each = min(timeit.repeat(empty, number=10_000, repeat=7)) / 10_000
    print(
        f"a mark {1e6 * each:.2f} us, {count:.0f} in a step: {count * each * 1e5 / plain:.4f} % "
        f"of it"
    )


def watch(plain: float) -> None:
    """Prints what the watch for leaks costs a step, its looks as many as they become."""
    leaks, every = Leaks(1, 10**9, CPU), tiny().log_every
    looks = [
        timeit.timeit(lambda done=done: list(leaks.observe(done, False)), number=1)
        for done in range(1, 2 * MAX_SAMPLES)
    ]
    each = statistics.mean(looks)
    print(
        f"a look for leaks {1e6 * each:.0f} us (the longest {1e6 * max(looks):.0f}), every "
        f"{every} steps: {each * 1e5 / plain / every:.4f} % of them"
    )


def unzipped(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def tables(folder: Path, ours: bool) -> None:
    """Prints the CPU time and the memory that the tables of three steps take, ours or torch's."""
    torch.set_num_threads(1)
    recorder = profile(activities=[ProfilerActivity.CPU])
    starts = {WARM_UP: recorder.start, WARM_UP + 3: recorder.stop}
    train(
        run_in(folder, f"tables_{ours}", WARM_UP + 4),
        make_observers=lambda done, device: [
            lambda done, over: () if over else starts.get(done, tuple)() or ()
        ],
    )
    process_memory.reset_peak_rss()
    before, start = process_memory.rss_bytes(), time.process_time()
    if ours:
        recorder.export_chrome_trace(str(folder / "trace.json"))
        _, rows = timeline.read((folder / "trace.json").read_bytes(), 3)
    else:
        rows = recorder.key_averages()
    took, more = time.process_time() - start, process_memory.peak_rss_bytes() - before
    print(
        f"tables of three steps, {'ours' if ours else 'torch'}: {took:.1f} s, {more / 1e6:.0f} MB "
        f"more at most, {len(rows)} operators"
    )


def main() -> None:
    """Prints all of them."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--steps", type=int, default=40)
    steps = options.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scenes.write(str(folder / "data"), 40, seed=0)
        profiled(folder, steps)
        for ours in (True, False):
            process = multiprocessing.get_context("spawn").Process(
                target=tables, args=(folder, ours)
            )
            process.start()
            process.join()


if __name__ == "__main__":
    main()
