"""Train on images and masks in the formats that people have: they are converted once, into a cache.

The cache lies beside the annotations, in a folder named by a digest of what was converted.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from gigamask import files
from gigamask.datatools.convert import ConvertOptions, convert
from gigamask.errors import GigamaskError, check_range, counted
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.rng import make_rng
from gigamask.serialization import read_json
from gigamask.training.config import TrainConfig
from gigamask.training.sam_config import SamTrainConfig

SUFFIX = ".gigamask"
"""End of the name of the cache, whose start is that of the annotations."""
DONE = "converted.json"
"""File that a complete conversion ends with."""
MAX_REASONS = 3
"""Reasons printed for images or masks that are left out."""

Config = TypeVar("Config", bound=TrainConfig)


def use_own_data(config: Config, report: Callable[[str], object] = print) -> Config:
    """Return a training on tars, converted from the images and masks that it names.

    Args:
        config: The training; its `images`, `masks` and `val_split` decide.
        report: Called with each line about what was converted and left out.

    Returns:
        The training with the tars as `data`, and the held-out ones as `evaluation.data` if a part
        is held out; unchanged if it names tars.

    Raises:
        GigamaskError: The files are not in a known format, do not pair, or nothing is left.
    """
    if not isinstance(config, SamTrainConfig):
        return config
    if config.images is None and config.masks is None:
        if config.val_split:
            raise GigamaskError(
                "--val-split holds out a part of --images or --masks; give held-out tars to "
                "--evaluation.data"
            )
        return config
    check_range("--val-split", config.val_split, 0, 0.9)
    if len(config.data) != 1 or (config.images is not None and config.masks is not None):
        raise GigamaskError(
            "--data with --images or --masks is one path: --data coco.json --images PHOTOS, or "
            f"--data PHOTOS --masks MASKS (got --data {' '.join(config.data)})"
        )
    if config.val_split and getattr(config.evaluation, "data", ()):
        raise GigamaskError("--val-split and --evaluation.data both name held-out images")
    (data,) = config.data
    source, images = (data, config.images) if config.masks is None else (config.masks, data)
    folder, counts = _converted(Path(source), Path(str(images)), config.val_split, config.seed)
    for name, count in counts.items():
        _report(f"{folder / name}", count, report)
    changed = replace(config, data=(str(folder / "train"),), images=None, masks=None, val_split=0.0)
    if config.val_split and isinstance(config.evaluation, ClickEvaluation):
        evaluation = replace(config.evaluation, data=(str(folder / "val"),))
        changed = replace(changed, evaluation=evaluation)
    return changed


def _converted(
    source: Path, images: Path, val_split: float, seed: int
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Convert annotations unless that is done; return the cache and the counts of each part."""
    for path in (source, images):
        if not path.exists():
            raise GigamaskError(f"{path}: no such file or folder; check --data, --images, --masks")
    cache = source.absolute().with_name(f"{source.absolute().name}{SUFFIX}")
    folder = cache / _digest(source, images, val_split, seed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GigamaskError(
            f"{folder}: cannot be created ({error.strerror}); run gigamask convert {source} "
            f"--images {images} --out SHARDS, and train with --data SHARDS"
        ) from None

    def held_out(names: list[str]) -> set[str]:
        order = sorted(names, key=lambda name: make_rng(seed, f"val split {name}").random())
        return set(order[: max(1, round(val_split * len(names)))] if val_split else [])

    parts: dict[str, Callable[[list[str]], set[str]]] = {
        "train": lambda names: set(names) - held_out(names)
    }
    if val_split:
        parts["val"] = held_out
    counts = {}
    with FileLock(folder / "lock"):  # the processes of one training wait for the first
        for part, select in parts.items():
            done = folder / part / DONE
            if not done.is_file():
                for path in (folder / part).glob("*.tar"):  # of a conversion that was stopped
                    path.unlink()
                counts[part] = convert(
                    source, images, folder / part, ConvertOptions(), select=select
                )
                files.write_text(done, json.dumps(counts[part]))
            counts[part] = read_json(done, dict)
    return folder, counts


def _digest(source: Path, images: Path, val_split: float, seed: int) -> str:
    """Return a digest of the annotation files' names, sizes and times, and of the split."""
    listed = sorted(source.rglob("*")) if source.is_dir() else [source]
    inside = images.absolute()
    described = [str(inside), str(val_split), str(seed if val_split else 0)]
    for path in listed:
        if path.is_file():
            status = path.stat()
            described.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return blake2b("\n".join(described).encode("utf-8", "replace"), digest_size=6).hexdigest()


def _report(where: str, counts: dict[str, Any], report: Callable[[str], object]) -> None:
    """Print what a part holds, and what was left out of it."""
    images, masks = counted(counts["images"], "image"), counted(counts["masks"], "mask")
    report(f"{where}: {images} with {masks}")
    for kind in ("images", "masks"):
        left_out = counts[f"skipped_{kind}"]
        if left_out:
            report(f"  {kind} left out: {len(left_out)} (listed in {where}/{DONE})")
        for sample in left_out[:MAX_REASONS]:
            report(f"    {sample['reason']}")
