"""Images per second from a slow server, with random access and streamed, and from a local disk.

The server runs on this machine and waits before each response, as an object store does; each
connection is a thread. Images have SA-1B's size.

Run: python benchmarks/remote.py [--delay 0.03] [--images 192] [--workers 2] [--micro-batch-size 4]
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import argparse
import multiprocessing
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from gigamask.data import index as indexes
from gigamask.data import loader, tar
from gigamask.data.mask_sampling import MaskFilters
from gigamask.data.sample_config import SampleConfig
from gigamask.data.sample_table import open_sample_table
from gigamask.interfaces import Sampler
from gigamask.plugins.memory import large_sample
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.samplers.random import Random
from gigamask.samplers.shards import Streamed
from gigamask.types import RandomSpec
from tests.orders import iter_steps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.servers import FileServer

TARS = 4


def serve(folder: Path, delay_s: float, told) -> None:
    """Serves a folder until told to stop; what was asked for and sent is told each time it is
    wanted."""
    with FileServer(folder, delay_s=delay_s) as server:
        told.send(server.url)
        while told.recv():
            told.send((len(server.asked), server.bytes_sent))
            server.forget()


def epoch(
    index: indexes.Index, sampler: Sampler, workers: int, micro: int, read_ahead: int
) -> float:
    """Returns the seconds that an epoch takes to load."""
    found = open_sample_table(index, MaskFilters())
    sequence = SampleSequence(sampler, found.items, locate=found.locate)
    source = loader.SampleSource(
        str(index.folder), SampleConfig(1024, 256), RandomSpec(0, 12, 12), read_ahead, 2 * micro
    )
    started = time.perf_counter()
    for _ in islice(
        loader.batches(source, iter_steps(sequence, 0, micro, micro), workers),
        found.items.count // micro,
    ):
        pass
    return time.perf_counter() - started


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", type=float, default=0.03, help="seconds before each answer")
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        jpg, json = large_sample.make((1500, 2250), 100)
        each = flags.images // TARS
        for number in range(TARS):
            members = []
            for name in (f"sa_{number * each + image}" for image in range(each)):
                members += [
                    (f"{name}.jpg", jpg),
                    (f"{name}.json", json.replace(b"sa_0.jpg", f"{name}.jpg".encode())),
                ]
            tar.write(folder / "tars" / f"{number}.tar", members)
        here, there = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder / "tars", flags.delay, there), daemon=True
        )
        server.start()
        url = here.recv()
        started = time.perf_counter()
        remote = indexes.build([f"{url}/{number}.tar" for number in range(TARS)], folder / "remote")
        here.send(True)
        print(
            f"{len(remote)} images of {len(jpg) / 1e6:.2f} MB; each answer after "
            f"{1e3 * flags.delay:.0f} "
            f"ms"
        )
        print(f"index: {time.perf_counter() - started:.1f} s, {here.recv()[0]} requests")
        local = indexes.build(folder / "tars", folder / "local")
        streamed = Streamed(lanes=max(flags.workers, 1) * flags.micro_batch_size, buffer=1)
        print(f"{'':32}{'images/s':>10}{'requests':>10}{'MB':>8}")
        for name, index, sampler, ahead in (
            ("local, random", local, Random(), 0),
            ("remote, random", remote, Random(), 0),
            ("remote, streamed", remote, streamed, 0),
            ("remote, streamed, 8 MiB ahead", remote, streamed, 2**23),
        ):
            elapsed_s = epoch(index, sampler, flags.workers, flags.micro_batch_size, ahead)
            here.send(True)
            asked, sent = here.recv()
            print(f"{name:32}{len(index) / elapsed_s:>10.1f}{asked:>10}{sent / 1e6:>8.0f}")
        here.send(False)


if __name__ == "__main__":
    main()
