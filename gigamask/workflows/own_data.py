"""Train on images and masks in the formats that people have: they are converted once, into a cache.

The cache lies beside the annotations, in a folder named by a digest of what was converted; for
remote files, in the working directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gigamask.config_files import check_run_out, config_to_resume
from gigamask.data import storage
from gigamask.data.index_format import is_index
from gigamask.data.sample_config import MaskOptions
from gigamask.errors import GigamaskError, abridged, check_range
from gigamask.evaluation.click_evaluation import ClickEvaluation
from gigamask.files import find_tars
from gigamask.interfaces import Evaluator
from gigamask.training.config import TrainConfig
from gigamask.training.sam_config import SamTrainConfig

if TYPE_CHECKING:
    from gigamask.data.storage import Paths
    from gigamask.datatools.sources import Source
    from gigamask.workflows.open_data import AnnotationOptions

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
    if config.is_finding_classes and isinstance(saved := config_to_resume(config), SamTrainConfig):
        config = replace(config, model=replace(config.model, class_names=saved.model.class_names))
    config = replace(config, evaluation=_evaluation_of_tars(config, report, strict))
    if (source := find_own_data(config)) is not None:
        options, split = _options_of(config), config.val_split
        train, *held_out = _convert(source, options, report, strict, split, config.seed)
        config = replace(config, data=(train,), images=None, masks=None, val_split=0.0)
        config = replace(config, **_options_of(SamTrainConfig))
        if held_out and isinstance(config.evaluation, ClickEvaluation):
            config = replace(config, evaluation=replace(config.evaluation, data=tuple(held_out)))
    if config.model.pixels.needs_measuring:
        from gigamask.workflows.pixel_window import measure_window

        return measure_window(config, report)
    return config


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
    given = storage.path_list(paths)
    source = _source(given, options.images, options.masks)
    if source is None:
        _refuse_options(options, given)
        return given
    return _convert(source, _options_of(options), report, options.strict)


def check_data(paths: Paths, options: AnnotationOptions) -> None:
    """Raise an error if local data are missing, before what takes seconds is imported.

    Args:
        paths: As for `own_tars`.
        options: As for `own_tars`.
    """
    from gigamask.data.index import find_shards

    given = storage.path_list(paths)
    if _source(given, options.images, options.masks) is None:
        find_shards([path for path in given if not storage.is_remote(storage.normalize(path))])


def _options_of(given: Any) -> dict[str, Any]:
    """Return what counts as a mask, by the names of the flags of all commands.

    Args:
        given: An object with these fields, or its class for their defaults.
    """
    return {name: getattr(given, name) for name in MaskOptions.__annotations__}


def _refuse_options(options: SamTrainConfig | AnnotationOptions, data: Sequence[str]) -> None:
    """Raise an error if options of annotations are given for tars."""
    default = _options_of(SamTrainConfig)
    for name, value in _options_of(options).items():
        if value != default[name]:
            raise GigamaskError(
                f"--{name.replace('_', '-')} is for annotations in other formats than SA-1B's, "
                "with --images or --masks, and for parquet (got --data "
                f"{abridged(data)}); drop it"
            )


def find_own_data(config: SamTrainConfig) -> Source | None:
    """Return the annotations that a training converts; None for tars.

    Args:
        config: The training.

    Raises:
        GigamaskError: The flags of data contradict each other, or a file is missing.
    """
    source = _source(config.data, config.images, config.masks)
    if source is None:
        if config.val_split:
            raise GigamaskError(
                "--val-split holds out a part of --images, --masks or parquet files; give held-out "
                "tars to --evaluation.data"
            )
        _refuse_options(config, config.data)
        return None
    check_range("--val-split", config.val_split, 0, 0.9)
    if config.val_split and getattr(config.evaluation, "data", ()):
        raise GigamaskError(
            "--val-split and --evaluation.data both name held-out images; give one of them"
        )
    return source


def _source(data: Sequence[str], images: str | None, masks: str | None) -> Source | None:
    """Return the annotations that are converted; None for tars."""
    if images is None and masks is None and all(map(_is_tars, data)):
        return None
    from gigamask.datatools.find_source import find

    return find(data, images, masks)


def _convert(source: Source, options: dict[str, Any], *settings: Any) -> tuple[str, ...]:
    """Return the folders of the tars that annotations become."""
    from gigamask.datatools.formats import ConvertOptions
    from gigamask.workflows.conversion_cache import convert_once

    return convert_once(source, ConvertOptions(**options), *settings)


def _is_tars(path: str) -> bool:
    """Return whether a path is known to be a tar, a glob or a folder of tars, or an index."""
    path = storage.normalize(path)
    if storage.strip_query(path).endswith(".tar"):
        return True
    if storage.is_remote(path):
        return any(name.endswith(".tar") for name in storage.list_files(path))
    return is_index(path) or bool(find_tars(Path(path)))


def _evaluation_of_tars(
    config: SamTrainConfig, report: Callable[[str], object], strict: bool
) -> Evaluator:
    """Return the evaluation in training; held-out images in other formats become tars."""
    evaluation = config.evaluation
    if not isinstance(evaluation, ClickEvaluation):
        return evaluation
    columns = config.images, config.masks
    source = _source(evaluation.data, None, None)
    if source is None and config.images and not all(map(_is_tars, evaluation.data)):
        source = _source(evaluation.data, config.images, None)
    if source is None:
        return evaluation
    is_same = type(_source(config.data, *columns)) is type(source)
    images, masks = columns if is_same else (None, None)
    from gigamask.workflows.open_data import AnnotationOptions

    options = AnnotationOptions(images=images, masks=masks, strict=strict, **_options_of(config))
    return replace(evaluation, data=own_tars(evaluation.data, options, report))


def find_classes(config: Config, verbose: bool = True) -> Config:
    """Return a training whose classes are all categories of its data, if it is to find them.

    Args:
        config: The training; its data are indexed if they have no index.
        verbose: Whether to print the classes.

    Raises:
        GigamaskError: No mask has a category.
    """
    if not config.is_finding_classes:
        return config
    from gigamask.training.train_data import open_index

    names = tuple(open_index(config).manifest.categories)
    if not names:
        raise GigamaskError(
            f"--classes auto: no mask of --data {abridged(config.data)} has a category; give data "
            "with categories, such as COCO's or YOLO's, or leave the flag out"
        )
    if verbose:
        print(f"--classes auto: {' '.join(names)}", flush=True)
    return config.with_(model__class_names=names)
