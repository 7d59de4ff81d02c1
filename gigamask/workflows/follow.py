"""Follows one sample through the nine doors of training and says what it is at each: type, shape, milliseconds, bytes.

The doors are called as training calls them, one after the other in this process. `docs/tour.md` tells the same way in words.

Not here: the doors themselves; each row names the function that was called.
"""

import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from gigamask.data import loader
from gigamask.data.dataset import Sa1bDataset, build_sample
from gigamask.data.index import Index
from gigamask.data.sample_table import open_sample_table
from gigamask.errors import GigamaskError
from gigamask.interfaces import LossSnapshot
from gigamask.masks.rle import RLEMasks
from gigamask.profiling.sample_memory import held_bytes
from gigamask.prompts.rounds import run_rounds
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.tasks import SamTask, make_decoder
from gigamask.types import DataCursor, LossSums, Prediction, Prompts, SampleRef


def follow(index: Index, row: int, run: SamTrainConfig) -> list[dict[str, Any]]:
    """Carries the image at `row` of the index through every door of `run`, prints a row for each and returns them."""
    doors: list[dict[str, Any]] = []

    def through(door: int, name: str, call: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = call()
        elapsed_ms = 1000 * (time.perf_counter() - started_s)
        doors.append(
            {
                "door": door,
                "name": name,
                "what": describe(result),
                "ms": round(elapsed_ms, 2),
                "bytes": held_bytes(result),
            }
        )
        print(
            "{door}  {name:22} {ms:9.2f} ms {bytes:>12,} bytes  {what}".format(**doors[-1]),
            flush=True,
        )
        return result

    name = index.entry_name(row)
    found = open_sample_table(index, run.loader.filters, seed=run.seed)
    if row not in found.rows_or_offsets:
        raise GigamaskError(
            f"{name}: none of its {index.mask_rows(row).stop - index.mask_rows(row).start} masks passes the filters; follow another image"
        )
    print(
        f"{name} with recipe {run.recipe}: {len(index)} images in the index, {found.items.count} of them can be trained on"
    )
    history = LossSnapshot.empty(found.items.count) if run.sampler.decay is not None else None
    order = through(1, "Sampler.order", lambda: run.sampler.order(found.items, 0, history))
    visits = np.flatnonzero(found.rows_or_offsets[order[np.arange(len(order))]] == row)
    visit = SampleRef(0, int(visits[0]) if len(visits) else 0, row)
    raw = through(2, "Sa1bDataset.read", lambda: Sa1bDataset(index).read(row))
    entry = through(3, "RawSample.annotation", raw.annotation)
    chance = run.random_spec
    sample = through(
        4, "build_sample", lambda: build_sample(raw.jpg, entry, visit, run.sample_config, chance)
    )
    batch = through(
        5,
        "loader.collate",
        lambda: loader.collate([sample], (), run.sample_config, chance, 0.5, DataCursor(1)),
    )
    model = run.build()
    embedding = through(
        6,
        "Sam.encode",
        lambda: model.encode(batch.images, batch.input_sizes, batch.random_inputs.drop_path),
    ).detach()
    part = slice(0, min(run.masks_per_chunk, len(batch.mask_image)))
    task = SamTask(run.prompts, run.loss, run.masks_per_chunk, full=run.loader.target == "full")
    targets, random_inputs = task.make_targets(batch, part, run.model.mask_size)
    decode = make_decoder(model, embedding, batch.mask_image[part], "fp32", targets.masks.shape[-1])
    rounds = run_rounds(decode, targets, run.prompts, random_inputs, batch.mask_only_round_u)
    first = through(7, "rounds.play, round 0", lambda: next(rounds))
    terms: LossSums = through(8, "Objective", lambda: run.loss(first, targets))
    print(
        f"   {', '.join(f'{part} {float(value / terms.count):.3f}' for part, value in terms.parts.items())} (means over {int(terms.count)} masks)"
    )
    state = TrainState.from_model(model, run)
    rate = run.optimizer.lr * run.schedule.factor(0, run.steps)
    through(
        9,
        "step, all rounds",
        lambda: step(task, state, [batch], 1, rate, run.optimizer.grad_clip).record,
    )
    return doors


def describe(value: Any) -> str:
    """Returns the type and shape of what came through a door, and of what it holds."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, RLEMasks):
        return f"Runs({len(value)} masks on {value.size[0]} x {value.size[1]}, {len(value.bounds)} changes)"
    if isinstance(value, bytes):
        return f"bytes[{len(value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {each:.3g}" for key, each in value.items())
    if isinstance(value, tuple):
        return f"({', '.join(describe(each) for each in value[:4])}{', ...' if len(value) > 4 else ''})"
    if is_dataclass(value):
        shown = [(field.name, getattr(value, field.name)) for field in fields(value)]
        arrays = (Tensor, np.ndarray, RLEMasks, Prompts, Prediction)
        inner = ", ".join(
            f"{name} {describe(each)}" for name, each in shown if isinstance(each, arrays)
        )
        return f"{type(value).__name__}({inner})"
    return str(value)
