"""Time the header scan of a tar against the standard library's, with a warm file cache.

Without a tar it writes one of 2,000 pairs with payloads of 60 and 20 KB. Target: 8 times as fast in
CPU time.

Run: python benchmarks/tar_scan.py [TAR]
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gigamask.data import tar

PAIRS = 2000
ROUNDS = 11
TARGET = 8.0


def list_by_tarfile(path: Path) -> list[tuple[str, int, int]]:
    with tarfile.open(path) as archive:
        return [(member.name, member.offset_data, member.size) for member in archive.getmembers()]


def list_by_scan(path: Path) -> list[tuple[str, int, int]]:
    found = tar.scan(path)
    return list(zip(found.names, found.offsets.tolist(), found.sizes.tolist(), strict=True))


def clock(work: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(path: Path) -> None:
    expected = list_by_tarfile(path)
    if list_by_scan(path) != expected:
        raise SystemExit(f"{path}: the scan and tarfile disagree")
    ways = {
        "tarfile.getmembers": lambda: list_by_tarfile(path),
        "gigamask tar.scan": lambda: list_by_scan(path),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, work in ways.items():
            times[name].append(clock(work))
    print(
        f"{path.name}: {len(expected)} members, {path.stat().st_size / 1e6:.0f} MB, median of "
        f"{ROUNDS} alternating rounds"
    )
    print(f"{'':20}{'cpu ms':>9}{'wall ms':>9}{'headers/s (cpu)':>17}")
    medians = {}
    for name, rounds in times.items():
        cpu, wall = (statistics.median(column) for column in zip(*rounds, strict=True))
        medians[name] = cpu
        print(f"{name:20}{cpu * 1e3:9.1f}{wall * 1e3:9.1f}{len(expected) / cpu:17,.0f}")
    plain, ours = medians.values()
    print(f"ratio {plain / ours:.1f}, target {TARGET:.0f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.tar"
            pairs = ((f"sa_{number}", number % 97) for number in range(PAIRS))
            tar.write(
                made,
                (
                    member
                    for stem, odd in pairs
                    for member in (
                        (f"{stem}.jpg", bytes(60_000 + odd)),
                        (f"{stem}.json", bytes(20_000 + odd)),
                    )
                ),
            )
            compare(made)
