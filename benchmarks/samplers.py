"""Time every sampler at SA-1B's size: order, first batch, further batches, memory.

    python benchmarks/samplers.py                    11,186,000 samples in 1,000 tars, and
                                                     1,094,154,480 for samplers that store no order
    python benchmarks/samplers.py --count 100000     a quick look

Each sampler runs in a process of its own. CPU time stands beside wall time; memory is the growth of
the peak beyond the sample table's columns. The usual implementation keeps Python lists and shuffles
them, as samplers for `torch.utils.data` do; it draws and updates losses one by one.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from gigamask import registry
from gigamask.data import process_memory
from gigamask.interfaces import SampleTable
from gigamask.rng import make_rng
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.loss_history import LossHistory
from tests.orders import iter_steps

IMAGES, MASKS, TARS, BATCH, BATCHES, LEARNED = 11_186_000, 1_094_154_480, 1000, 256, 200, 1024
WITHOUT_AN_ORDER = ("lazy", "chunked")
"""Samplers that hold no order: they are measured at the number of SA-1B's masks, too."""


def items_of(count: int) -> SampleTable:
    """Returns items in tars of equal size, of which most are fine, as SA-1B's masks are."""
    generator = make_rng(0, "benchmark")
    columns = {
        "tar": np.sort(generator.integers(TARS, size=count, dtype=np.int32)),
        "granularity": generator.choice(3, count, p=(0.7, 0.25, 0.05)).astype(np.int32),
        "difficulty": generator.random(count, dtype=np.float32),
        "complexity": generator.choice(3, count, p=(0.4, 0.4, 0.2)).astype(np.int32),
        "domain": generator.choice(4, count).astype(np.int32),
    }
    return SampleTable(count, columns)


def held_mb() -> float:
    """Returns the memory that this process holds, and counts its peak from here on."""
    process_memory.reset_peak_rss()
    return process_memory.rss_bytes() / 1e6


def peak_mb() -> float:
    """Returns the most memory that this process has held since."""
    return process_memory.peak_rss_bytes() / 1e6


def measure(name: str, count: int) -> dict[str, float]:
    """Times one of our samplers."""
    sampler = registry.make_component("sampler", name)
    items = SampleTable(count, {}) if count > IMAGES else items_of(count)
    history = None
    if sampler.decay is not None:
        history = LossHistory.empty(name, count, sampler.decay)
        seen = np.flatnonzero(make_rng(0, "seen").random(count) < 0.1)
        history.update(
            seen, np.zeros(len(seen), np.int64), make_rng(0, "losses").exponential(size=len(seen))
        )
    before, wall, cpu = held_mb(), time.perf_counter(), time.process_time()
    sequence = SampleSequence(sampler, items, history)
    steps = iter_steps(sequence, 0, BATCH, BATCH)
    next(steps)
    found = {"first batch, s": time.perf_counter() - wall, "its CPU, s": time.process_time() - cpu}
    batches = min(BATCHES, sequence.epoch_length // BATCH - 1)
    wall = time.perf_counter()
    for _ in range(batches):
        next(steps)
    found |= {
        "a batch, ms": 1e3 * (time.perf_counter() - wall) / max(batches, 1),
        "positions": sequence.epoch_length,
        "grew, MB": peak_mb() - before,
    }
    cpu = time.process_time()
    sampler.order(items, 1, history.snapshot if history else None)[np.arange(BATCH)]
    found |= {"next epoch, CPU s": time.process_time() - cpu}
    if history is not None:
        chosen, wall = make_rng(0, "update").integers(count, size=LEARNED), time.perf_counter()
        for _ in range(20):
            history.update(chosen, np.zeros(LEARNED, np.int64), np.ones(LEARNED))
        found |= {f"update of {LEARNED}, ms": 1e3 * (time.perf_counter() - wall) / 20}
        wall = time.perf_counter()
        drawn = sampler.order(items, 1, history.snapshot)[np.arange(sequence.epoch_length)]
        found |= {
            f"draw of {LEARNED}, ms": 1e3 * (time.perf_counter() - wall) * LEARNED / len(drawn)
        }
    return found


def plain_random(items: SampleTable) -> Callable[[], object]:
    """Shuffles a list of all items."""
    order = list(range(items.count))
    random.Random(0).shuffle(order)
    return lambda: [order.pop() for _ in range(BATCH)]


def plain_stratified(items: SampleTable) -> Callable[[], object]:
    """Keeps a list for each stratum, takes as many of each as the smallest has, and shuffles them
    together."""
    strata: dict[int, list[int]] = {}
    for item, stratum in enumerate(items.columns["granularity"].tolist()):
        strata.setdefault(stratum, []).append(item)
    least, chance = min(map(len, strata.values())), random.Random(0)
    order = [item for stratum in strata.values() for item in chance.sample(stratum, least)]
    chance.shuffle(order)
    return lambda: [order.pop() for _ in range(BATCH)]


def plain_curriculum(items: SampleTable) -> Callable[[], object]:
    """Sorts a list of all items by difficulty and shuffles its first 30 %."""
    difficulty = items.columns["difficulty"].tolist()
    order = sorted(range(items.count), key=difficulty.__getitem__)[: int(0.3 * items.count)]
    random.Random(0).shuffle(order)
    return lambda: [order.pop() for _ in range(BATCH)]


def plain_loss_weighted(items: SampleTable) -> Callable[[], object]:
    """Draws each batch from all losses anew and moves each loss by itself."""
    losses, chance = [1.0] * items.count, random.Random(0)

    def batch() -> None:
        for item in chance.choices(range(items.count), losses, k=BATCH):
            losses[item] = 0.99 * losses[item] + 0.01 * 0.5

    return batch


PLAIN = {
    "random": plain_random,
    "stratified_granularity": plain_stratified,
    "curriculum": plain_curriculum,
    "loss_weighted": plain_loss_weighted,
}


def measure_plain(name: str, count: int) -> dict[str, float]:
    """Times the plain way of a sampler."""
    items = items_of(count)
    before, wall, cpu = held_mb(), time.perf_counter(), time.process_time()
    batch = PLAIN[name](items)
    batch()
    found = {"first batch, s": time.perf_counter() - wall, "its CPU, s": time.process_time() - cpu}
    wall = time.perf_counter()
    for _ in range(3):
        batch()
    return found | {
        "a batch, ms": 1e3 * (time.perf_counter() - wall) / 3,
        "grew, MB": peak_mb() - before,
    }


def apart(*words: str) -> dict[str, float]:
    """Returns what this script measures in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=IMAGES)
    parser.add_argument("--lazy-count", type=int, default=MASKS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps((measure_plain if given.plain else measure)(given.one, given.count)))
        return
    columns = (
        "positions",
        "first batch, s",
        "its CPU, s",
        "next epoch, CPU s",
        "a batch, ms",
        f"draw of {LEARNED}, ms",
        f"update of {LEARNED}, ms",
        "grew, MB",
    )
    print(f"{given.count:,} items in {TARS:,} tars, batches of {BATCH}")
    print(
        f"targets: first batch of an epoch < 0.5 s of CPU, draw and update of {LEARNED} < 1 ms; "
        f"a draw is its share of an epoch's order"
    )
    print(f"{'':38}" + "".join(f"{name:>20}" for name in columns))
    counts = [(name, given.count) for name in registry.names("sampler")] + [
        (name, given.lazy_count) for name in WITHOUT_AN_ORDER
    ]
    for name, count in counts:
        ours = apart("--one", name, "--count", str(count))
        rows = {name if count == given.count else f"{name}, {count:,} items": ours}
        if name in PLAIN and count == given.count:
            plain = apart("--one", name, "--count", str(count), "--plain")
            rows["  the plain way"] = plain
            rows["  plain / ours"] = {
                each: plain[each] / max(ours[each], 1e-9)
                for each in columns
                if each in plain and each != "positions"
            }
        for label, row in rows.items():
            print(
                f"{label:38}"
                + "".join(f"{row[each]:>20,.3g}" if each in row else " " * 20 for each in columns),
                flush=True,
            )


if __name__ == "__main__":
    main()
