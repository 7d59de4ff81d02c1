"""Memory of the loader's worker processes while they make batches.

Every process is measured after each batch, at a random point of its work, so that many samples
find its peak. The result is what it has allocated beyond an idle process that was started the same
way, so that imports do not count.
"""

import multiprocessing
from collections.abc import Generator, Iterator
from contextlib import closing
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np

from gigamask.data import process_memory, worker_pool
from gigamask.data.process_memory import ProcessMemory, in_bytes
from gigamask.errors import GigamaskError
from gigamask.profiling.held_bytes import held_bytes
from gigamask.types import Batch, BatchProtocol

MIN_BATCHES = 9
GROWTH_BYTES, GROWTH_SHARE = 8e6, 0.1
"""A process has grown if the median of its last third of samples exceeds that of its first third by
both; decoding alone moves single samples by 20 MB."""


def measure(
    steps: Iterator[tuple[BatchProtocol, ...]],
    count: int,
    prefetch: int,
    progress: worker_pool.Progress,
) -> dict[str, Any]:
    """Take batches from a loader and measure its processes.

    Args:
        steps: The loader's steps, not started.
        count: Number of batches to take.
        prefetch: Batches that each process prepares ahead.
        progress: Called as `progress(done, count)` after each batch.

    Returns:
        Bytes of each worker, of a batch, and of its masks.

    Raises:
        GigamaskError: There are too few batches, or no worker processes.
    """
    if count < MIN_BATCHES:
        raise GigamaskError(f"--batches must be at least {MIN_BATCHES} to see growth, got {count}")
    idle = idle_bytes()
    looks: dict[int, list[ProcessMemory]] = {}
    images, most_batch, masks, most_masks = 0, 0, 0, 0.0
    assert isinstance(steps, Generator)  # closing it ends the processes
    with closing(steps):
        batches = (cast(Batch, batch) for step in steps for batch in step)
        for number, batch in enumerate(islice(batches, count)):
            for pid, seen in process_memory.workers_memory().items():
                looks.setdefault(pid, []).append(seen)
            images += len(batch.names)
            most_batch = max(most_batch, held_bytes(batch))
            held = held_bytes((batch.rle_bounds, batch.rle_offsets))
            masks += held
            most_masks = max(most_masks, held / max(len(batch.names), 1))
            progress(number + 1, count)
    if not looks:
        raise GigamaskError("no loader process could be measured; use at least one worker")
    return {
        "batches": count,
        "images": images,
        "idle_bytes": idle,
        "workers": [worker(pid, seen, idle) for pid, seen in looks.items()],
        "batch_bytes": most_batch,
        "mask_bytes_per_sample": round(masks / max(images, 1)),
        "mask_bytes_per_sample_most": round(most_masks),
        "prefetch": prefetch,
        "waiting_bytes_limit": len(looks) * prefetch * most_batch,
    }


def worker(pid: int, seen: list[ProcessMemory], idle: int) -> dict[str, Any]:
    """Return the peak of one process, and whether it grew between the first and the last third.

    Args:
        pid: Its process id.
        seen: The samples of its memory.
        idle: Allocated bytes of an idle process.
    """
    above = np.array([look.allocated for look in seen]) - idle
    third = max(len(above) // 3, 1)
    first, last = (float(np.median(part)) for part in (above[:third], above[-third:]))
    return {
        "pid": pid,
        "resident_bytes": max(look.rss for look in seen),
        "proportional_bytes": max(look.pss for look in seen),
        "above_imports_bytes": int(above.max()),
        "first_third_bytes": round(first),
        "last_third_bytes": round(last),
        "grew": last - first > max(GROWTH_BYTES, GROWTH_SHARE * first),
    }


def idle_bytes() -> int:
    """Return the allocated bytes of an idle process, started and with imports like a worker."""
    context = multiprocessing.get_context()
    here, there = context.Pipe()
    process = context.Process(target=_wait, args=(there,), daemon=True)
    process.start()
    try:
        here.recv()
        found = process_memory.memory_of(process.pid) if process.pid else None
        return found.allocated if found else 0
    finally:
        here.send(None)
        process.join()


def _wait(connection: Connection) -> None:
    from gigamask.data import loader  # noqa: F401 (a worker's imports)

    connection.send(None)
    connection.recv()


def table(found: dict[str, Any]) -> str:
    """Format the result of `measure` as plain text."""
    workers = found["workers"]
    heads = ("worker", "resident", "PSS", "above imports", "first third", "last third")
    lines = [
        f"{found['images']} images in {found['batches']} batches from {len(workers)} processes;"
        " peak of each",
        "".join(
            f"{head:>{width}}" for head, width in zip(heads, (10, 12, 12, 16, 14, 14), strict=True)
        ),
    ]
    for each in workers:
        sizes = [
            in_bytes(each[name])
            for name in (
                "resident_bytes",
                "proportional_bytes",
                "above_imports_bytes",
                "first_third_bytes",
                "last_third_bytes",
            )
        ]
        row = "".join(
            f"{size:>{width}}" for size, width in zip(sizes, (12, 12, 16, 14, 14), strict=True)
        )
        lines.append(f"{each['pid']:>10}{row}{'  GROWS' if each['grew'] else ''}")
    lines += [
        f"a batch as sent: {in_bytes(found['batch_bytes'])} at most; mask data of a sample"
        f" {in_bytes(found['mask_bytes_per_sample'])},"
        f" in one batch {in_bytes(found['mask_bytes_per_sample_most'])}",
        f"batches waiting: at most {len(workers)} processes x {found['prefetch']} x"
        f" {in_bytes(found['batch_bytes'])} = {in_bytes(found['waiting_bytes_limit'])}",
    ]
    if any(each["grew"] for each in workers):
        lines.append(
            "a growing process may keep what it has read: run again with more --batches, and"
            " report it if it keeps growing"
        )
    return "\n".join(lines)
