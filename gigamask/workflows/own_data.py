"""Train on images and masks in the formats that people have: they are converted once, into a cache.

The cache lies beside the annotations, in a folder named by a digest of what was converted; for
remote files, in the working directory.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gigamask.config_files import check_run_out, config_to_resume
from gigamask.data import storage
from gigamask.data.image_folder import CONVERTED_SUFFIX
from gigamask.datatools import convert_labels, parquet_files
from gigamask.datatools.convert import ConvertOptions, convert, lines, list_source
from gigamask.datatools.convert_parquet import ParquetFiles
from gigamask.datatools.left_out import LeftOutRecord
from gigamask.errors import GigamaskError, check_range, counted
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.files import expand_home, relative_to
from gigamask.interfaces import Evaluator
from gigamask.rng import make_rng
from gigamask.training.config import TrainConfig
from gigamask.training.sam_config import SamTrainConfig, is_finding_classes
from gigamask.training.train_data import open_index
from gigamask.workflows import conversion_cache
from gigamask.workflows.conversion_cache import DONE
from gigamask.workflows.open_data import AnnotationOptions, Paths, path_list
from gigamask.workflows.pixel_window import measure_window

OPTIONS = ("keep_crowds", "ignore", "binary", "nearest_value")
"""Fields of `ConvertOptions` that all commands have that read annotations."""

Config = TypeVar("Config", bound=TrainConfig)


def use_own_data(
    config: Config, report: Callable[[str], object] = print, strict: bool = False
) -> Config:
    """Return a training on tars, converted from the images and masks that it names.

    Args:
        config: The training; its `images`, `masks` and `val_split` decide.
        report: Called with each line about what was converted and left out.
        strict: Whether to raise an error if anything was left out.

    Returns:
        The training with the tars as `data`, and the held-out ones as `evaluation.data` if a part
        is held out; unchanged if it names tars, but for the window of pixels if it is measured.

    Raises:
        GigamaskError: The files are not in a known format, do not pair, or nothing is left; or the
            run folder holds other files.
    """
    check_run_out(config)
    if not isinstance(config, SamTrainConfig):
        return config
    if is_finding_classes(config) and isinstance(saved := config_to_resume(config), SamTrainConfig):
        config = replace(config, model=replace(config.model, class_names=saved.model.class_names))
    config = replace(config, evaluation=_evaluation_of_tars(config, report, strict))
    pair = find_own_data(config)
    if pair is None:
        return measure_window(config, report)
    options = _convert_options(config)
    parts = _converted(*pair, config.val_split, config.seed, options, report)
    if strict:
        _check_complete(parts)
    train, *held_out = parts
    changed = replace(config, data=(train,), images=None, masks=None, val_split=0.0)
    changed = replace(changed, **_options_of(ConvertOptions()))
    if held_out and isinstance(config.evaluation, ClickEvaluation):
        evaluation = replace(config.evaluation, data=tuple(held_out))
        changed = replace(changed, evaluation=evaluation)
    return measure_window(changed, report)


def own_tars(
    paths: Paths,
    options: AnnotationOptions,
    report: Callable[[str], object] = print,
) -> tuple[str, ...]:
    """Return tars, converted from images and masks if they are in another format.

    Args:
        paths: Tars or an index, which are returned; parquet files; or one path, as `data` of a
            training.
        options: Where its images or masks are, and what counts as a mask.
        report: Called with each line about what was converted and left out.

    Raises:
        GigamaskError: The files are not in a known format, do not pair, or nothing is left; or
            anything is left out of a strict reading.
    """
    given = path_list(paths)
    pair = _source(given, options.images, options.masks)
    if pair is None:
        _refuse_options(_convert_options(options), given)
        return given
    parts = _converted(*pair, 0.0, 0, _convert_options(options), report)
    if options.strict:
        _check_complete(parts)
    return tuple(parts)


def _options_of(given: SamTrainConfig | AnnotationOptions | ConvertOptions) -> dict[str, Any]:
    """Return what counts as a mask, by the names of the flags of all commands."""
    return {name: getattr(given, name) for name in OPTIONS}


def _convert_options(given: SamTrainConfig | AnnotationOptions) -> ConvertOptions:
    return ConvertOptions(**_options_of(given))


def _refuse_options(options: ConvertOptions, data: Sequence[str]) -> None:
    """Raise an error if options of annotations are given for tars."""
    default = _options_of(ConvertOptions())
    for name, value in _options_of(options).items():
        if value != default[name]:
            raise GigamaskError(
                f"--{name.replace('_', '-')} is for annotations in other formats than SA-1B's, "
                "with --images or --masks, and for parquet (got --data "
                f"{' '.join(data)}); drop it"
            )


def _check_complete(parts: Mapping[str, int]) -> None:
    """Raise an error if anything was left out of a part."""
    for folder, left_out in parts.items():
        if left_out:
            raise GigamaskError(
                f"--strict: {left_out} of the images or masks were left out, listed in "
                f"{folder}/{DONE}; repair them, or leave --strict out"
            )


def find_own_data(config: SamTrainConfig) -> tuple[Path | ParquetFiles, Path | None] | None:
    """Return what a training converts, and the folder of its images; None for tars.

    Args:
        config: The training.

    Raises:
        GigamaskError: The flags of data contradict each other, or a file is missing.
    """
    pair = _source(config.data, config.images, config.masks)
    if pair is None:
        if config.val_split:
            raise GigamaskError(
                "--val-split holds out a part of --images, --masks or parquet files; give held-out "
                "tars to --evaluation.data"
            )
        _refuse_options(_convert_options(config), config.data)
        return None
    check_range("--val-split", config.val_split, 0, 0.9)
    if config.val_split and getattr(config.evaluation, "data", ()):
        raise GigamaskError("--val-split and --evaluation.data both name held-out images")
    return pair


def _source(
    data: Sequence[str], images: str | None, masks: str | None
) -> tuple[Path | ParquetFiles, Path | None] | None:
    """Return what is converted and the folder of its images; None for tars."""
    if files := parquet_files.find(data):
        return ParquetFiles(files, images, masks), None
    return annotations_and_images(data, images, masks)


def _evaluation_of_tars(
    config: SamTrainConfig, report: Callable[[str], object], strict: bool
) -> Evaluator:
    """Return the evaluation in training; held-out images in parquet files become tars."""
    evaluation = config.evaluation
    if not isinstance(evaluation, ClickEvaluation) or not parquet_files.find(evaluation.data):
        return evaluation
    columns = config.images, config.masks
    columns = columns if parquet_files.find(config.data) else (None, None)
    images, masks = columns
    options = AnnotationOptions(images=images, masks=masks, strict=strict, **_options_of(config))
    return replace(evaluation, data=own_tars(evaluation.data, options, report))


def annotations_and_images(
    data: Sequence[str], images: str | None, masks: str | None
) -> tuple[Path, Path] | None:
    """Return the annotations and the folder of their images; None for tars.

    Args:
        data: As of a training.
        images: As in a training.
        masks: As in a training.

    Raises:
        GigamaskError: There are several paths, both `images` and `masks`, or no such file.
    """
    if images is None and masks is None:
        folder = Path(*map(expand_home, data[:1]))
        voc = folder / convert_labels.VOC_OBJECTS, folder / convert_labels.VOC_IMAGES
        return voc if len(data) == 1 and all(path.is_dir() for path in voc) else None
    if len(data) != 1 or (images is not None and masks is not None):
        raise GigamaskError(
            "what --images or --masks belong to is one path: coco.json --images PHOTOS, or "
            f"PHOTOS --masks MASKS (got {' '.join(data)})"
        )
    pair = (data[0], str(images)) if masks is None else (masks, data[0])
    source, folder = (Path(expand_home(path)) for path in pair)
    for path in (source, folder):
        if not path.exists():
            raise GigamaskError(
                f"{path}: no such file or folder{relative_to(path)}; check --data, "
                "--images, --masks"
            )
    return source, folder


def find_classes(config: Config, verbose: bool = True) -> Config:
    """Return a training whose classes are all categories of its data, if it is to find them.

    Args:
        config: The training; its data are indexed if they have no index.
        verbose: Whether to print the classes.

    Raises:
        GigamaskError: No mask has a category.
    """
    if not isinstance(config, SamTrainConfig) or not is_finding_classes(config):
        return config
    names = tuple(open_index(config).manifest.categories)
    if not names:
        raise GigamaskError(
            f"--classes auto: no mask of --data {' '.join(config.data)} has a category; give data "
            "with categories, such as COCO's or YOLO's, or leave the flag out"
        )
    if verbose:
        print(f"--classes auto: {' '.join(names)}", flush=True)
    return replace(config, model=replace(config.model, class_names=names))


def _converted(
    source: Path | ParquetFiles,
    images: Path | None,
    val_split: float,
    seed: int,
    options: ConvertOptions,
    report: Callable[[str], object],
) -> dict[str, int]:
    """Convert annotations unless that is done.

    Returns:
        The folder of each part, with the number of images and masks that were left out of it.
    """
    beside = Path(str(source)).absolute()
    if storage.is_remote(str(source)):
        beside = Path(re.sub(r"\W*://\W*", "_", str(source)).replace("/", "_"))
    cache = beside.with_name(f"{beside.name}{CONVERTED_SUFFIX}")
    listing = list_source(source, images, options, with_annotations=False)
    split = (val_split, seed) if val_split else ()
    folder = cache / conversion_cache.digest(source, images, listing, options, *split)
    advice = f"run gigamask convert {source} {f'--images {images} ' if images else ''}--out SHARDS"

    def held_out(names: list[str]) -> set[str]:
        order = sorted(names, key=lambda name: make_rng(seed, f"val split {name}").random())
        return set(order[: max(1, round(val_split * len(names)))])

    parts: dict[str, Callable[[list[str]], set[str]]] = {"all": set}
    if val_split:
        parts = {"train": lambda names: set(names) - held_out(names), "val": held_out}
    left_out = {}
    for part, select in parts.items():
        out = folder / part
        make = partial(convert, source, images, out, options, select=select)
        advise = f"{advice}, and give --data SHARDS"
        counts = conversion_cache.reuse_or_make(out, make, advise, report)
        counts = counts | {"images_without_label": listing.unlabeled}  # photographs may be added
        left_out[f"{out}"] = _report(f"{out}", counts, report)
    return left_out


def _report(where: str, counts: dict[str, Any], report: Callable[[str], object]) -> int:
    """Print what a part holds and what was left out of it; return how many were left out."""
    images, masks = counted(counts["images"], "image"), counted(counts["masks"], "mask")
    report(f"{where}: {images} with {masks}")
    for line in lines(counts, f"{where}/{DONE}"):
        report(line)
    return len(LeftOutRecord.from_counts(counts))
