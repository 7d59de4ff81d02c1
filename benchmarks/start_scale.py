"""A training's start on SA-1B's number of images, and its resume from ViT-H's state of 7.7 GB.

The index has as many rows as SA-1B, in 1,000 tars that are links to one tar of small scenes, so
that it is complete, checksums included. A start is measured cold (the index and the tar dropped
from the page cache, nothing else) and warm, in a process of its own, to the first batch. The state
is random bytes with the names and shapes of a recipe's. With several processes, the first one reads
it, and the others receive it over gloo, as they would over NCCL. Memory is each process's own
(RssAnon), without pages of files. Everything is written below --folder, and deleted. Prints
Markdown.

Run: python -m benchmarks.start_scale [--images 11186078] [--tars 1000]
    [--state sam_vit_h sam_vit_l:2] [--folder FOLDER]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import io
import json
import multiprocessing
import shutil
import struct
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gigamask.data import index as indexes
from gigamask.data import index_format
from gigamask.distributed.world import World, destroy_world, init_world
from gigamask.files import crc32, write_bytes
from gigamask.models import manifest
from gigamask.recipes import find
from gigamask.serialization import with_checksum
from gigamask.synthetic.scenes import write
from gigamask.training import checkpoint
from gigamask.training.config import TrainConfig
from gigamask.training.state import TrainState
from gigamask.training.train_data import TrainData, open_index
from gigamask.training.unreached import reaching_settings
from tests.ranks import environment, free_port

CPU = torch.device("cpu")
SCENES, GIB, POLL_S = 50, 2**30, 0.01


def write_tar(folder: Path, images: int) -> Path:
    """Writes a tar of small scenes, each many times under other names."""
    source = folder / "scenes"
    write(source, SCENES, long_side=(96, 128))
    pairs: list[tuple[bytes, dict[str, Any]]] = []
    for tar in sorted(source.glob("*.tar")):
        with tarfile.open(tar) as opened:
            files = {each.name: opened.extractfile(each) for each in opened if each.isfile()}
            content = {name: file.read() for name, file in files.items() if file}
        pairs += [
            (content[name], json.loads(content[name.replace(".jpg", ".json")]))
            for name in sorted(content)
            if name.endswith(".jpg")
        ]
    out = folder / "one.tar"
    with tarfile.open(out, "w") as made:
        for number in range(images):
            jpg, entry = pairs[number % len(pairs)]
            entry["image"] |= {"image_id": number, "file_name": f"sa_{number}.jpg"}
            for suffix, data in (("jpg", jpg), ("json", json.dumps(entry).encode())):
                info = tarfile.TarInfo(f"sa_{number}.{suffix}")
                info.size = len(data)
                made.addfile(info, io.BytesIO(data))
    return out


def write_index(folder: Path, images: int, tars: int) -> Path:
    """Writes an index of links to one tar."""
    one = write_tar(folder, images // tars)
    shards = folder / "shards"
    shards.mkdir()
    links = [shards / f"sa_{number:06d}.tar" for number in range(tars)]
    for link in links:
        os.link(one, link)
    [row] = index_format.rows_of_index(indexes.build([one], folder / "one_index").folder)
    rows = [replace(row, summary=replace_path(row.summary, str(link))) for link in links]
    index_format.merge(rows, folder / "index")
    return folder / "index"


def replace_path(summary: Any, path: str) -> Any:
    """Returns a shard's summary with another path."""
    import msgspec

    tar = msgspec.structs.replace(summary.tar, path=path)
    return msgspec.structs.replace(summary, tar=tar)


def drop_cached(paths: Sequence[Path]) -> None:
    """Drops files from the page cache."""
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def own_bytes() -> int:
    """Returns the memory of this process without pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Samples the memory of this process; `peak` is the largest, `end` the last."""
    found, done = {"peak": own_bytes()}, threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            found["peak"] = max(found["peak"], own_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found["end"] = own_bytes()
        found["peak"] = max(found["peak"], found["end"])


def in_processes(count: int, act: Callable[..., dict[str, Any]], *given: Any) -> list[dict]:
    """Returns what a function returns in new processes, which form a world if there are several."""
    context, port = multiprocessing.get_context("spawn"), free_port()
    queue = context.Queue()
    processes = [
        context.Process(target=_call, args=(rank, count, port, queue, act, *given))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=550) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(count)]


def _call(rank: int, count: int, port: int, queue: Any, act: Any, *given: Any) -> None:
    world = World()
    if count > 1:
        os.environ.update(environment(rank, count, port))
        world = init_world(os.environ, CPU)
    queue.put((rank, act(world, *given)))
    if count > 1:
        destroy_world(world)


def start(world: World, index: str, out: str, workers: int) -> dict[str, Any]:
    """Opens an index and takes the first batch of a training."""
    run = find("tiny")()
    run = replace(run, data=(index,), out=out, loader=replace(run.loader, workers=workers))
    before = own_bytes()
    with peak_memory() as memory:
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        opened = open_index(run)
        opened_s = time.perf_counter()
        data = TrainData(run, opened)
        batches = data.batches()
        next(batches)
        first_s = time.perf_counter()
        next(batches)
        found = {
            "open": opened_s - begin_s,
            "first": first_s - begin_s,
            "second": time.perf_counter() - first_s,
            "cpu": time.process_time() - cpu_s,
            "images": len(opened),
        }
        batches.close()
    return found | {"memory": memory["peak"] - before}


def print_starts(folder: Path, images: int, tars: int) -> None:
    """Prints what starts on indexes of several sizes take."""
    print("| images | tars | | index opened s | first batch s | second s | CPU s | MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for share in (100, 10, 1):
        below = folder / f"start_{share}"
        below.mkdir()
        index = write_index(below, images // share, max(1, tars // share))
        files = [*index.iterdir(), below / "one.tar"]
        for name in ("cold", "warm"):
            if name == "cold":
                drop_cached(files)
            [found] = in_processes(1, start, str(index), str(below / name), 0)
            print(
                f"| {found['images']:,} | {max(1, tars // share):,} | {name} "
                f"| {found['open']:.2f} | {found['first']:.2f} | {found['second']:.3f} "
                f"| {found['cpu']:.2f} | {found['memory'] / 2**20:.0f} |",
                flush=True,
            )
        shutil.rmtree(below)


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a safetensors file of random float32 numbers, piece by piece."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    piece = np.random.default_rng(0).random(2**22, np.float32) * np.float32(0.01)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while end:
            data = piece.tobytes()[:end]
            file.write(data)
            end -= len(data)
        file.flush()
        os.fsync(file.fileno())


def write_state(run: TrainConfig) -> Path:
    """Writes a checkpoint of a run: weights, and AdamW's two numbers of each trained parameter."""
    model = run.build("meta")
    weights = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    folder = Path(run.out) / "checkpoints" / manifest.checkpoint_name(1000)
    folder.mkdir(parents=True)
    write_tensors(folder / checkpoint.MODEL, weights)
    keys = ("exp_avg", "exp_avg_sq")
    moments = {f"{key}/{name}": shape for name, shape in trained.items() for key in keys}
    steps = {f"step/{name}": () for name in trained}
    write_tensors(folder / checkpoint.OPTIMIZER, moments | steps)
    names = (checkpoint.MODEL, checkpoint.OPTIMIZER)
    files = {
        name: {"bytes": (folder / name).stat().st_size, "crc32": crc32(folder / name)}
        for name in names
    }
    content = {
        "format": manifest.FORMAT,
        "step": 1000,
        "samples": 256_000,
        "files": files,
        "ledger": None,
        "scale": None,
        "unreached": {"names": [], "settings": reaching_settings(run)},
    }
    write_bytes(folder / manifest.MANIFEST, with_checksum(content))
    return folder


def resume(world: World, run: TrainConfig) -> dict[str, Any]:
    """Verifies and loads the newest checkpoint of a run, after what that imports is imported."""
    TrainState.initialize(find("tiny")(), CPU)
    before, begin_s, cpu_s = own_bytes(), time.perf_counter(), time.process_time()
    with peak_memory() as memory:
        folder = manifest.newest(Path(run.out)) if world.is_main else None
        folder = Path(world.gather(str(folder))[0])
        verified_s = time.perf_counter()
        state: TrainState = checkpoint.load_state(run, CPU, folder, world)
        assert state.step == 1000
        found = {
            "verify": verified_s - begin_s,
            "load": time.perf_counter() - verified_s,
            "cpu": time.process_time() - cpu_s,
        }
        found["held"] = own_bytes() - before
        found["state"] = sum(
            tensor.nbytes
            for parameter in state.model.parameters()
            for tensor in (parameter, *([] if parameter.grad is None else [parameter.grad]))
        ) + sum(tensor.nbytes for tensor in state.optimizer_tensors().values())
    return found | {"peak": memory["peak"] - before}


def print_resumes(folder: Path, states: Sequence[str]) -> None:
    """Prints what resumes take."""
    print(
        "\n| state | GB | process | | verify s | load s | CPU s | held GB, with gradients "
        "| peak GB |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for each in states:
        name, _, count = each.partition(":")
        run = replace(find(name)(), data=("none",), out=str(folder / name), device="cpu")
        written = write_state(run)
        files = [path for path in written.iterdir() if path.suffix == ".safetensors"]
        gigabytes = sum(path.stat().st_size for path in files) / 1e9
        for cache in ("cold", "warm"):
            if cache == "cold":
                drop_cached(files)
            for rank, found in enumerate(in_processes(int(count or 1), resume, run)):
                print(
                    f"| {name} | {gigabytes:.1f} | {rank + 1} of {count or 1} | {cache} "
                    f"| {found['verify']:.1f} | {found['load']:.1f} | {found['cpu']:.1f} "
                    f"| {found['held'] / 1e9:.1f} ({found['state'] / 1e9:.1f}) "
                    f"| {found['peak'] / 1e9:.1f} |",
                    flush=True,
                )
        shutil.rmtree(folder / name)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--images", type=int, default=11_186_078)
    options.add_argument("--tars", type=int, default=1000)
    options.add_argument(
        "--state",
        nargs="*",
        default=["sam_vit_h", "sam_vit_l:2"],
        help="recipe, or recipe:processes",
    )
    options.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.images:
            print_starts(Path(folder), given.images, given.tars)
        if given.state:
            print_resumes(Path(folder), given.state)


if __name__ == "__main__":
    main()
