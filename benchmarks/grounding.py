"""Measure parts of grounding: mask feature cache, curriculum, equal exposure of kinds, OHEM.

Prints four tables: an epoch of batches that runs the segmenter, the next epoch, and one in another
process that reads the cache; the difficulty of the queries in each epoch of `curriculum` and
`random`; how often `relevance_diversity` and `random` draw queries of the rarest and the most
frequent joint cell; the mean loss of the queries that OHEM keeps and of all, after --steps steps.

Run: python -m benchmarks.grounding [--data TARS --queries FILE --segmenter WEIGHTS] [--scenes 40]
    [--steps 50]
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from gigamask.data import index as indexes
from gigamask.data.index import Index
from gigamask.distributed.world import World
from gigamask.losses.ohem import OHEM
from gigamask.models import state_dict
from gigamask.models.configs import tiny
from gigamask.models.init import build_model
from gigamask.plugins.grounding import described_scenes, queries
from gigamask.plugins.grounding.config import GroundingTrainConfig
from gigamask.plugins.grounding.data import QueryDataset, open_queries
from gigamask.plugins.grounding.recipes import ground_tiny
from gigamask.registry import make_component
from gigamask.samplers.batch_sampler import SampleSequence
from gigamask.training.ohem import mine_hard_masks
from gigamask.training.optim import AdamW
from gigamask.training.state import TrainState
from gigamask.training.step import step
from tests.orders import iter_steps

BATCH, EPOCHS = 32, 6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="*", default=[])
    parser.add_argument("--queries", nargs="*", default=[])
    parser.add_argument("--segmenter")
    parser.add_argument("--scenes", type=int, default=40)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = prepared(given, Path(folder)).check()
        index = indexes.open_or_build(run.data, run.out)
        dataset = open_queries(index, queries.read(run.queries), run.seed)
        print(
            f"{len(dataset.queries)} queries about {len(np.unique(dataset.rows))} images, batches "
            f"of {BATCH}"
        )
        show_features(run, index)
        show_orders(dataset)
        show_mining(run, index, given.steps)


def prepared(given: argparse.Namespace, folder: Path) -> GroundingTrainConfig:
    """Returns a run over the data that are given, or over scenes made for it; an untrained
    segmenter where none is."""
    data, asked = tuple(given.data), tuple(given.queries)
    if not data:
        paths, made = described_scenes.write(folder / "scenes", given.scenes)
        queries.write(folder / "queries.jsonl", made)
        data, asked = tuple(map(str, paths)), (str(folder / "queries.jsonl"),)
    segmenter = given.segmenter
    if segmenter is None:
        segmenter = str(folder / "tiny.safetensors")
        model = build_model(tiny(), 0)
        state_dict.save_weights(model.state_dict(), model.config, segmenter)
    return replace(
        ground_tiny(),
        data=data,
        queries=asked,
        segmenter=segmenter,
        out=str(folder / "run"),
        batch_size=BATCH,
        micro_batch_size=BATCH,
    )


def show_features(run: GroundingTrainConfig, index: Index) -> None:
    """Prints what an epoch of batches takes while images are new, when they are in memory, and when
    another process finds them on disk."""
    print("epoch                 images encoded   wall s    CPU s")
    supply = run.data_source(index)
    for name in ("the first", "the next", "of another process"):
        supplied = replace(run).data_source(index) if name == "of another process" else supply
        asked = supplied.make_loader(False)
        before, wall_s, cpu_s = (
            asked.mask_features.encoded,
            time.perf_counter(),
            time.process_time(),
        )
        sequence = SampleSequence(run.sampler, supplied.items, None, supplied.locate)
        steps = -(-supplied.items.count // BATCH)
        for _ in asked.batches(islice(iter_steps(sequence, 0, BATCH, BATCH), steps)):
            pass
        took = time.perf_counter() - wall_s, time.process_time() - cpu_s
        print(f"{name:20} {asked.mask_features.encoded - before:15} {took[0]:8.2f} {took[1]:8.2f}")


def show_orders(dataset: QueryDataset) -> None:
    """Prints what a curriculum and equal exposure change."""
    items = dataset.items
    difficulty = items.columns["difficulty"]
    print(f"\nmean difficulty in epochs 0 to {EPOCHS - 1}")
    for name in ("random", "curriculum"):
        orders = [
            make_component("sampler", name).order(items, epoch, None) for epoch in range(EPOCHS)
        ]
        print(
            f"  {name:20}"
            + "".join(
                f"{difficulty[np.asarray(order[np.arange(len(order))])].mean():8.3f}"
                for order in orders
            )
        )
    columns = [
        items.columns[name].astype(np.int64) for name in ("granularity", "complexity", "domain")
    ]
    _, cells = np.unique(np.stack(columns, 1), axis=0, return_inverse=True)
    print(
        f"\nvisits of a joint cell of granularity, complexity and domain in an epoch, least and "
        f"most of {cells.max() + 1}"
    )
    for name in ("random", "relevance_diversity"):
        order = make_component("sampler", name).order(items, 0, None)
        counts = np.bincount(
            cells[np.asarray(order[np.arange(len(order))])], minlength=cells.max() + 1
        )
        print(f"  {name:20}{counts.min():8}{counts.max():8}")


def show_mining(run: GroundingTrainConfig, index: Index, steps: int) -> None:
    """Prints the losses of the queries that mining keeps, behind a short training without it."""
    supply, state = run.data_source(index), TrainState.from_model(run.build(), run)
    sequence, task = (
        SampleSequence(run.sampler, supply.items, None, supply.locate),
        run.task(torch.device("cpu")),
    )
    losses, kept = [], []
    hardest = OHEM(keep_ratio=0.25)
    for number, batches in enumerate(
        supply.make_loader(False).batches(islice(iter_steps(sequence, 0, BATCH, BATCH), steps + 10))
    ):
        if number < steps:
            step(task, state, batches, BATCH, AdamW().lr, 1.0)
            continue
        chosen, each = mine_hard_masks(task, hardest, state.model, batches, BATCH, World())
        losses.append(each.numpy())
        kept.append(each[batches[0].batch_index[chosen[0].mask_image]].numpy())
    every, hard = np.concatenate(losses), np.concatenate(kept)
    share, mean = len(hard) / len(every), every[~np.isnan(every)].mean()
    print(
        f"\nmining behind {steps} steps: mean loss of all {mean:.3f}, of the {share:.0%} kept "
        f"{hard.mean():.3f}"
    )


if __name__ == "__main__":
    main()
