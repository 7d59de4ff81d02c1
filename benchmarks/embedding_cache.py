"""Seconds of a step of `finetune_laptop` with a cold and with a warm embedding cache, and without.

Random weights of SAM ViT-B, synthetic micrographs with more masks than a step takes, one image in a
step, one process. Medians of CPU time and of wall time.

Run: python -m benchmarks.embedding_cache [--steps 3] [--image-size 1024]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gigamask import recipes
from gigamask.cli.main import main as gigamask
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.train_data import TrainData, open_index

CPU = torch.device("cpu")


def timed(config: SamTrainConfig, batches: Sequence, state: TrainState) -> tuple[float, float]:
    """Return the median CPU and wall seconds of a step on each batch."""
    task, found = config.task(CPU), []
    for batch in batches:
        start = time.process_time(), time.perf_counter()
        step(task, state, [batch], 1, 1e-5, 1.0).result()
        found.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    cpu, wall = zip(*found, strict=True)
    return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=1024)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scenes = str(Path(folder, "scenes"))
        gigamask(["synth", scenes, "--kind", "cells", "--images", str(given.steps)])
        config = recipes.finetune_laptop().with_(
            data=scenes,
            out=str(Path(folder, "run")),
            batch_size=1,
            model__image_size=given.image_size,
        )
        cached = replace(config, embedding_cache=str(Path(folder, "cache")))
        plain = replace(config, embedding_cache=None)
        loader = TrainData(config, open_index(config)).batches()
        batches = [batch for (batch,), _ in zip(loader, range(given.steps), strict=False)]
        state = TrainState.from_model(config.build(), config)
        state.model.train()
        rows = {
            "without": timed(plain, batches, state),
            "cold cache": timed(cached, batches, state),
            "warm cache": timed(cached, batches, state),
        }
    print("| | CPU s a visit | ratio | wall s a visit | ratio |")
    print("|---|---|---|---|---|")
    first = rows["without"]
    for name, (cpu, wall) in rows.items():
        print(f"| {name} | {cpu:.2f} | {cpu / first[0]:.2f} | {wall:.2f} | {wall / first[1]:.2f} |")


if __name__ == "__main__":
    main()
