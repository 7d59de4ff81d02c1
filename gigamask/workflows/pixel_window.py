"""Measure the window of pixels on a sample of the training images, once for a run.

The result is part of the model's configuration, as two numbers for each channel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from gigamask.config_files import config_to_resume
from gigamask.data import image, image_folder, tar
from gigamask.data.index import find_shards
from gigamask.data.shard_index import pair_members, read_payloads
from gigamask.data.storage import ByteRange, basename
from gigamask.errors import CorruptSampleError, GigamaskError, counted
from gigamask.pixels import PixelConfig, channel_percentiles
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.stages import STAGES

MAX_SHARDS, MAX_IMAGES = 16, 64
"""Most shards, and images of them, that are read."""
MAX_SIDE = 256
"""Most rows and columns of an image that are used."""


Config = TypeVar("Config", bound=SamTrainConfig)


def measure_window(config: Config, report: Callable[[str], object] = print) -> Config:
    """Return a training whose window is stated in numbers.

    Args:
        config: The training; percentiles of the training images are its window.
        report: Called with a line about what was measured.

    Returns:
        The training with the window that its run began with, or else with the one measured.

    Raises:
        GigamaskError: The images cannot be read, or have no window to measure.
    """
    measured = _saved(config) or _measure(config.data, config.model.pixels, report)
    return replace(config, model=replace(config.model, pixels=measured))


def _saved(config: SamTrainConfig) -> PixelConfig | None:
    """Return the pixels of the run in the folder of a training, or of its stages, if they agree."""
    for folder in [config.out, *(str(Path(config.out) / stage) for stage in STAGES)]:
        saved = config_to_resume(replace(config, out=folder))
        if isinstance(saved, SamTrainConfig):
            pixels = saved.model.pixels
            if pixels.window and replace(pixels, window=()) == config.model.pixels:
                return pixels
    return None


def _measure(
    data: Sequence[str], pixels: PixelConfig, report: Callable[[str], object]
) -> PixelConfig:
    """Measure the window on images evenly spaced in the data."""
    flags = f"--percentiles {pixels.percentiles[0]:g} {pixels.percentiles[1]:g}"
    samples, problems, eight_bit = [], [], 0
    for name, raw in _sample_images(data):
        try:
            stored = image.read_stored(raw, name, channels=pixels.channels)
            pixels.check_channels(stored, name)
        except CorruptSampleError as error:
            problems.append(str(error))
            continue
        if stored.dtype == np.uint8:
            eight_bit += 1
            continue
        steps = (slice(None, None, -(-side // MAX_SIDE)) for side in stored.shape[:2])
        samples.append(stored[tuple(steps)].reshape(-1, 1, stored.shape[2]))
    if not samples:
        reason = f"the first: {problems[0]}" if problems else "there are no images"
        if eight_bit:
            reason = "the images have 8 bits per channel, which are used as they are"
        raise GigamaskError(f"{flags}: no window can be measured, {reason}; leave the flag out")
    if len({each.shape[2] for each in samples}) > 1:
        raise GigamaskError(
            f"{flags}: the images have different numbers of channels; state them with --window"
        )
    low, high = channel_percentiles(np.concatenate(samples), pixels.percentiles, flags)
    window = tuple(float(f"{value:.6g}") for pair in zip(low, high, strict=True) for value in pair)
    shown = " ".join(f"{value:g}" for value in window)
    report(f"{flags} of {counted(len(samples), 'image')}: --window {shown}")
    return replace(pixels, window=window)


def _sample_images(data: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of images, evenly spaced in shards that are evenly spaced."""
    shards = _evenly(find_shards(data), MAX_SHARDS)
    for shard in shards:
        if image_folder.is_folder(shard):
            listing = image_folder.scan(shard)
            files = [
                (name, ByteRange(os.path.join(shard, name), 0, size))
                for name, size in zip(listing.names, listing.sizes, strict=True)
            ]
        else:
            members = tar.scan(shard, salvage=True)
            images, jsons, _, _ = pair_members(members)
            files = [
                (stem, ByteRange(shard, int(members.offsets[at]), int(members.sizes[at])))
                for stem, at in images.items()
                if stem in jsons or not jsons
            ]
        chosen = _evenly(files, -(-MAX_IMAGES // len(shards)))
        payloads = read_payloads([span for _, span in chosen])
        for (name, _), payload in zip(chosen, payloads, strict=True):
            if not isinstance(payload, CorruptSampleError):
                yield f"{basename(shard)}:{name}", payload


def _evenly(items: Sequence, count: int) -> list:
    """Return at most `count` items, evenly spaced."""
    places = np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    return [items[place] for place in places]
