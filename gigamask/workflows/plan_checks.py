"""Check a training that is planned as training checks it before its first step."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gigamask.config_files import check_used
from gigamask.data import storage
from gigamask.errors import GigamaskError
from gigamask.models.weight_paths import STARTER
from gigamask.training.config import ImageTrainConfig, check_init
from gigamask.training.optim import check_frozen, select_trained
from gigamask.training.sam_config import SamTrainConfig
from gigamask.workflows.own_data import find_own_data

PLACEHOLDER = "none"
"""Stands for data and weights that a plan does not need."""


def check_trainable(config: ImageTrainConfig) -> list[str]:
    """Check a training as training does, apart from files that are not here yet.

    Args:
        config: The training; without `data`, it is planned for data to come.

    Returns:
        The errors of training that are set aside: those of missing files and weights.

    Raises:
        GigamaskError: Training would refuse a value, a file that is here, or how they fit together.
    """
    assumed: list[str] = []

    def check(action: Callable[[], Any], paths: Sequence[str]) -> Any:
        try:
            return action()
        except GigamaskError as error:
            if not any(map(_is_missing, paths)):
                raise
            assumed.append(str(error))

    data, images, masks = config.data, *(getattr(config, key, None) for key in ("images", "masks"))
    paths = [path for path in (*data, images, masks) if path]
    remote = [path for path in paths if storage.is_remote(path)]
    assumed += [f"{path}: a plan does not read remote data" for path in remote]
    own = None
    if isinstance(config, SamTrainConfig) and not remote:
        own = check(lambda: find_own_data(config), paths)
    is_tars = bool(data) and own is None and not assumed
    phases = config.phases()
    for phase in phases:
        named = replace(phase, data=data if is_tars else paths_to_come(phase))
        assumed += check_phase(named, [each.out for each in phases])
    if is_tars:
        check(config.check_data, data)
    check(config.evaluation.check_inputs, getattr(config.evaluation, "data", ()))
    for name in ("attributes", "mask_store"):
        path = getattr(config.loader, name, None)
        if path and _is_missing(path):
            assumed.append(f"--loader.{name.replace('_', '-')} {path}: no such file or folder")
    return list(dict.fromkeys(assumed))


def paths_to_come(config: ImageTrainConfig) -> tuple[str, ...]:
    """Return what stands for the paths of the data, of which each may have a weight.

    Args:
        config: The training.
    """
    return (PLACEHOLDER,) * (len(config.data) or len(config.data_weights) or 1)


def check_phase(config: ImageTrainConfig, earlier: Sequence[str]) -> list[str]:
    """Check the values, the initial weights, the frozen modules and the kind of a training.

    Args:
        config: The training, or a phase of it, with data or a placeholder.
        earlier: Run folders of its other phases, which need not exist yet.

    Returns:
        As of `check_trainable`.

    Raises:
        GigamaskError: A value is invalid, weights do not fit, or something is required.
    """
    absent = (*earlier, *config.other_weights)
    replace(config, init=config.init or PLACEHOLDER).check()
    check_used(config)
    init, model, assumed = config.init or "", config.build("meta"), []
    assumed += config.check_plan(model)
    select_trained(model, config.freeze, config.unfreeze, config.lora)
    try:
        if not init:
            config.check()
            if config.freeze or config.unfreeze or config.lora.rank:
                check_frozen(model, (), None)
        path = check_init(init, absent)
    except GigamaskError as error:
        return [*assumed, str(error)]
    if path and path not in earlier and (Path(path).exists() or path == STARTER):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch: no value is copied
            loaded = config.build("meta").load_init(init)
        check_frozen(model, loaded, init)
    elif path and path not in absent:
        assumed.append(f"--init {init}: a plan does not download weights, so they may not fit")
    return assumed


def _is_missing(path: str) -> bool:
    """Return whether no local file or folder has a path, or matches it."""
    return not (storage.is_remote(path) or Path(path).exists() or glob.glob(path, recursive=True))
