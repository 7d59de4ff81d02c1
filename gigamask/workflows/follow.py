"""Trace one sample through the nine steps of training: type, shape, milliseconds and bytes at each.

This calls the functions of training one after the other; `docs/tour.md` explains them.
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
from gigamask.profiling.held_bytes import held_bytes
from gigamask.prompts.rounds import run_rounds
from gigamask.records import DataCursor, SampleRef
from gigamask.training.config import item_sampler
from gigamask.training.sam_config import SamTrainConfig
from gigamask.training.state import TrainState
from gigamask.training.step import step
from gigamask.training.tasks import SamTask, make_decoder
from gigamask.types import LossSums, Prediction, Prompts


class _Tracer:
    """Calls functions, and prints and keeps a record of each call."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = call()
        elapsed_ms = 1000 * (time.perf_counter() - started_s)
        record = {
            "step": len(self.steps) + 1,
            "name": name,
            "what": describe(result),
            "ms": round(elapsed_ms, 2),
            "bytes": held_bytes(result),
        }
        self.steps.append(record)
        text = "{step}  {name:22} {ms:9.2f} ms {bytes:>12,} bytes  {what}"
        print(text.format(**record), flush=True)
        return result


def follow(index: Index, row: int, config: SamTrainConfig) -> list[dict[str, Any]]:
    """Trace an image through every step of training, and print a line for each.

    Args:
        index: Index of the data.
        row: Row of the image.
        config: Configuration of the training.

    Returns:
        A record per step: its number, the function's name, a description of what it returned,
        milliseconds and bytes.

    Raises:
        GigamaskError: None of the image's masks passes the filters.
    """
    trace = _Tracer()
    name = index.entry_name(row)
    table = open_sample_table(index, config.loader.filters, seed=config.seed)
    if row not in table.rows_or_offsets:
        masks = index.mask_rows(row).stop - index.mask_rows(row).start
        raise GigamaskError(
            f"{name}: none of its {masks} masks passes the filters; choose another image"
        )
    count = table.items.count
    print(
        f"{name} with recipe {config.recipe}: {len(index)} images in the index, {count} usable for "
        "training"
    )
    history = LossSnapshot.empty(count) if config.sampler.decay is not None else None
    order = trace("Sampler.order", lambda: item_sampler(config).order(table.items, 0, history))
    positions = np.flatnonzero(table.rows_or_offsets[order[np.arange(len(order))]] == row)
    sample_ref = SampleRef(0, int(positions[0]) if len(positions) else 0, row)
    raw = trace("Sa1bDataset.read", lambda: Sa1bDataset(index).read(row))
    annotation = trace("RawSample.annotation", raw.annotation)
    sample_config, spec = config.sample_config, config.random_spec
    sample = trace(
        "build_sample",
        lambda: build_sample(raw.jpg, annotation, sample_ref, sample_config, spec),
    )
    batch = trace(
        "loader.collate",
        lambda: loader.collate([sample], (), sample_config, spec, 0.5, DataCursor(1)),
    )
    model = config.build()
    embedding = trace(
        "Sam.encode",
        lambda: model.encode(batch.images, batch.input_sizes, batch.random_inputs.drop_path),
    ).detach()
    part = slice(0, min(config.masks_per_chunk, len(batch.mask_image)))
    task = SamTask(
        config.prompts,
        config.loss,
        config.masks_per_chunk,
        full_resolution=config.loader.target == "full",
    )
    targets, random_inputs = task.make_targets(batch, part, config.model.mask_size)
    decode = make_decoder(model, embedding, batch.mask_image[part], "fp32", targets.masks.shape[-1])
    rounds = run_rounds(decode, targets, config.prompts, random_inputs, batch.mask_only_round_u)
    first = trace("run_rounds, round 0", lambda: next(rounds))
    sums: LossSums = trace("Loss", lambda: config.loss(first, targets))
    means = [f"{name} {float(value / sums.count):.3f}" for name, value in sums.parts.items()]
    print(f"   {', '.join(means)} (means over {int(sums.count)} masks)")
    state = TrainState.from_model(model, config)
    lr = config.optimizer.lr * config.schedule.factor(0, config.steps)
    trace(
        "step, all rounds",
        lambda: step(task, state, [batch], 1, lr, config.optimizer.grad_clip).result().record,
    )
    return trace.steps


def describe(value: Any) -> str:
    """Return the type and shape of a value, and of the arrays in it."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, RLEMasks):
        size = f"{value.size[0]} x {value.size[1]}"
        return f"RLEMasks({len(value)} masks of {size}, {len(value.bounds)} run boundaries)"
    if isinstance(value, bytes):
        return f"bytes[{len(value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:.3g}" for key, number in value.items())
    if isinstance(value, tuple):
        more = ", ..." if len(value) > 4 else ""
        return f"({', '.join(describe(item) for item in value[:4])}{more})"
    if is_dataclass(value):
        attributes = [(field.name, getattr(value, field.name)) for field in fields(value)]
        arrays = (Tensor, np.ndarray, RLEMasks, Prompts, Prediction)
        inner = ", ".join(
            f"{name} {describe(item)}" for name, item in attributes if isinstance(item, arrays)
        )
        return f"{type(value).__name__}({inner})"
    return str(value)
