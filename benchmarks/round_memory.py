"""Memory and time of the rounds: one graph over all, or a backward pass per round and per chunk.

A decoder of the official size on a 64 x 64 embedding, 4 masks. "saved" is the most that autograd
keeps at a time, without parameters; "peak" is the growth of the process's resident memory, each row
in a process of its own.

Run: python benchmarks/round_memory.py
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import SamConfig
from gigamask.models.init import build_model
from gigamask.models.sam.sam import Sam
from gigamask.prompts.rounds import run_rounds
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.rng import make_rng
from gigamask.types import Prediction, RandomInputs, Targets

torch.set_num_threads(1)

MASKS = 4
# The decoder is ViT-B's; the encoder, which no round runs, is cut to one narrow block.
SPEC = SamConfig(embed_dim=64, depth=1, num_heads=1, global_attn_indexes=())
SCHEDULES = {
    1: InteractiveSchedule(clicks=0, mask_only_rounds=False),
    3: InteractiveSchedule(clicks=2, mask_only_rounds=False),
    5: InteractiveSchedule(clicks=4, mask_only_rounds=False),
    11: InteractiveSchedule(),
}


class SavedBytes:
    """Counts the bytes autograd keeps for the backward pass: each storage once, parameters not at
    all."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.holders: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> "Held":
        return Held(self, tensor)

    @staticmethod
    def unpack(held: "Held") -> torch.Tensor:
        return held.tensor


class Held:
    """One saved tensor; its bytes count until it is let go."""

    def __init__(self, book: SavedBytes, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.loss_history, self.tensor = book, tensor
        self.key, self.bytes = (
            storage.data_ptr(),
            0 if storage.data_ptr() in book.known else storage.nbytes(),
        )
        holders = book.holders.get(self.key, 0)
        book.holders[self.key] = holders + 1
        if not holders:
            book.now += self.bytes
            book.peak = max(book.peak, book.now)

    def __del__(self) -> None:
        self.loss_history.holders[self.key] -= 1
        if not self.loss_history.holders[self.key]:
            self.loss_history.now -= self.bytes


def world(masks: int) -> tuple[Sam, torch.Tensor, Targets, RandomInputs]:
    """Returns a model, an embedding, smooth masks and their draws."""
    rng = make_rng(0, "round memory")
    model = build_model(SPEC, seed=0)
    embedding = torch.tensor(rng.standard_normal((1, 256, 64, 64)), dtype=torch.float32)
    coarse = torch.tensor(rng.random((masks, 1, 8, 8)), dtype=torch.float32)
    foreground = (
        torch.nn.functional.interpolate(coarse, size=(256, 256), mode="bicubic")[:, 0] > 0.6
    )
    truth = Targets(
        foreground,
        torch.ones_like(foreground),
        torch.tensor([[100.0, 200.0, 700.0, 800.0]]).expand(masks, 4),
        (4.0, 4.0),
        torch.ones(masks, 2),
    )
    numbers = (rng.random(masks), rng.random((masks, 9, 2)), rng.standard_normal((masks, 4)))
    first, clicks, noise = (torch.tensor(each, dtype=torch.float32) for each in numbers)
    return model, embedding, truth, RandomInputs(first, clicks, noise, torch.zeros(1, 1, 2))


def losses(model: Sam, embedding: torch.Tensor, truth: Targets, draws: RandomInputs, rounds: int):
    """Yields the loss of each round."""
    images = torch.zeros(len(truth.masks), dtype=torch.int64)

    def decode(prompts):
        low, iou = model.decode(embedding, images, prompts)
        return Prediction(low, iou, low)

    for played in run_rounds(decode, truth, SCHEDULES[rounds], draws, 0.5):
        yield SamLoss()(played, truth).loss


def run(
    way: str,
    chunk: int,
    rounds: int,
    model: Sam,
    embedding: torch.Tensor,
    truth: Targets,
    draws: RandomInputs,
) -> None:
    """Computes the gradients of all rounds, by one graph or round by round."""
    leaf = embedding.detach().requires_grad_()
    if way == "graph":
        torch.stack(list(losses(model, leaf, truth, draws, rounds))).sum().backward()
        return
    for start in range(0, len(truth.masks), chunk):
        part = slice(start, start + chunk)
        some = Targets(
            truth.masks[part],
            truth.valid[part],
            truth.boxes_input[part],
            truth.cell_xy,
            truth.scale_xy[part],
        )
        spent = RandomInputs(
            draws.first_prompt[part], draws.clicks[part], draws.box_noise[part], draws.drop_path
        )
        for loss in losses(model, leaf, some, spent, rounds):
            loss.backward()


def measure(way: str, chunk: int, rounds: int) -> dict[str, float]:
    """Returns the peaks of one run in MiB; the first, of one mask and round, brings in what is
    loaded only once."""
    model, embedding, truth, draws = world(MASKS)
    one = Targets(
        truth.masks[:1], truth.valid[:1], truth.boxes_input[:1], truth.cell_xy, truth.scale_xy[:1]
    )
    run(
        "leaf",
        1,
        1,
        model,
        embedding,
        one,
        RandomInputs(
            draws.first_prompt[:1], draws.clicks[:1], draws.box_noise[:1], draws.drop_path
        ),
    )
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    book = SavedBytes(model)
    with torch.autograd.graph.saved_tensors_hooks(book.pack, book.unpack):
        run(way, chunk, rounds, model, embedding, truth, draws)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"saved": book.peak / 2**20, "peak": (peak - before) / 2**20}


def time_ratios(
    masks: int = 2, rounds: int = 5, repeats: int = 3
) -> list[tuple[str, float, float]]:
    """Returns CPU and wall time of each way over the whole graph's: medians of alternating runs."""
    arguments = world(masks)
    ways = {
        "one graph": ("graph", masks),
        "each round": ("leaf", masks),
        "each round and mask": ("leaf", 1),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, (way, chunk) in ways.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run(way, chunk, rounds, *arguments)
            if repeat:
                taken[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    return [
        (name, cpu / medians["one graph"][0], wall / medians["one graph"][1])
        for name, (cpu, wall) in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure",
        nargs=3,
        metavar=("WAY", "CHUNK", "ROUNDS"),
        help="one line's numbers as JSON, for the table",
    )
    if chosen := parser.parse_args().measure:
        print(json.dumps(measure(chosen[0], int(chosen[1]), int(chosen[2]))))
        return
    lines = [
        ("one graph", "graph", 4, 1),
        ("one graph", "graph", 4, 3),
        ("one graph", "graph", 4, 11),
        ("each round", "leaf", 4, 1),
    ]
    lines += [
        ("each round", "leaf", 4, 3),
        ("each round", "leaf", 4, 11),
        ("each round and mask", "leaf", 1, 3),
        ("each round and mask", "leaf", 1, 11),
    ]
    found = {}
    print(f"{'backward':<20} {'rounds':>6} {'saved MiB':>10} {'peak MiB':>9}")
    for name, way, chunk, rounds in lines:
        command = [sys.executable, __file__, "--measure", way, str(chunk), str(rounds)]
        found[name, rounds] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout
        )
        print(
            f"{name:<20} {rounds:>6} {found[name, rounds]['saved']:>10.0f} "
            f"{found[name, rounds]['peak']:>9.0f}",
            flush=True,
        )
    print(f"\n{'11 rounds':<20} {'saved':>10} {'peak':>9}   target")
    for name in ("each round", "each round and mask"):
        saved, peak = (
            found[name, 11][kind] / found["one graph", 11][kind] for kind in ("saved", "peak")
        )
        print(
            f"{name:<20} {'1/' + format(1 / saved, '.1f'):>10} {'1/' + format(1 / peak, '.1f'):>9} "
            f"  1/8"
        )
        grown = {kind: found[name, 11][kind] / found[name, 3][kind] for kind in ("saved", "peak")}
        print(f"{'  over 3 rounds':<20} {grown['saved']:>10.2f} {grown['peak']:>9.2f}   1.00")
    print(f"\n{'2 masks, 5 rounds':<20} {'CPU time':>10} {'wall':>9}   target")
    for name, cpu, wall in time_ratios():
        print(f"{name:<20} {cpu:>10.2f} {wall:>9.2f}   1.00")


if __name__ == "__main__":
    main()
