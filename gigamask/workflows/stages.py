"""Split a training into stages: MAE pre-training, decoder on a frozen encoder, joint training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gigamask.errors import GigamaskError, check_range
from gigamask.models.lora_config import LoRA
from gigamask.training.config import TrainConfig
from gigamask.training.sam_config import SamTrainConfig

STAGES = ("mae", "decoder", "joint")
MAE_PARTS = ("patch_embed", "pos_embed", "blocks")
"""Parts of an image encoder that a masked autoencoder trains: all but the neck."""
DECODER_STEPS_SHARE = 5 / 90
"""Default length of the decoder stage as a fraction of the joint stage: 5 of 90 epochs in the
mixed-prompts recipe."""
MAX_WARMUP_SHARE = 0.1
"""Longest warm-up of the stages before the last one, as a fraction of their steps; a recipe's
warm-up is meant for the recipe's full length."""


def make_stages(
    config: TrainConfig, names: str | None, steps: Mapping[str, int | None]
) -> list[TrainConfig]:
    """Return the configurations of the stages of a training.

    Each stage has a folder below `config.out` and starts from the weights of the previous one.
    `mae` pre-trains the encoder, `decoder` trains everything else with the encoder frozen, and
    `joint` is the recipe itself, which trains everything.

    Args:
        config: The training.
        names: Stages separated by commas, such as `mae,decoder,joint`; None means no stages.
        steps: Steps of the stages `mae` and `decoder`; None means the default.

    Returns:
        One configuration per stage; without stages, the phases of the training.

    Raises:
        GigamaskError: A stage is unknown or out of order, `steps` has a stage that is not trained,
            or weights are missing or would not be used.
    """
    given = {stage: number for stage, number in steps.items() if number is not None}
    for stage, number in steps.items():
        check_range(f"--{stage}-steps", number, 1)
    if names is None:
        return config.phases()
    stages = tuple(name.strip() for name in names.split(","))
    _check(config, names, stages, given)
    assert isinstance(config, SamTrainConfig)
    folders = {stage: str(Path(config.out) / stage) for stage in stages}
    encoder = f"mae:{folders['mae']}" if "mae" in folders else config.init
    init = {"mae": None, "decoder": encoder, "joint": folders.get("decoder", encoder)}
    frozen = tuple(f"image_encoder.{part}" for part in MAE_PARTS)
    if "mae" not in folders and not str(encoder).startswith("mae:"):
        frozen = ("image_encoder",)
    decoder = replace(
        config,
        lora=LoRA(),
        freeze=tuple(dict.fromkeys([*config.freeze, *frozen])),
        steps=given.get("decoder") or max(1, round(config.steps * DECODER_STEPS_SHARE)),
    )
    configs: dict[str, TrainConfig] = {"decoder": _limit_warmup(decoder), "joint": config}
    if "mae" in stages:
        from gigamask.recipes.mae import pretraining_for

        configs["mae"] = _limit_warmup(pretraining_for(config, given.get("mae")))
    return [replace(configs[stage], out=folders[stage], init=init[stage]) for stage in stages]


def _limit_warmup(config: TrainConfig) -> TrainConfig:
    limit = int(config.steps * MAX_WARMUP_SHARE)
    return replace(config, schedule=config.schedule.shortened(limit))


def _check(
    config: TrainConfig, names: str, stages: tuple[str, ...], steps: Mapping[str, int]
) -> None:
    """Raise `GigamaskError` if these stages cannot be trained."""
    order = ", ".join(STAGES)
    if not isinstance(config, SamTrainConfig):
        raise GigamaskError(f"--stages needs a recipe that trains SAM, got {config.recipe}")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise GigamaskError(f"--stages: unknown stage {unknown[0]!r}; choose from {order}")
    if list(stages) != [stage for stage in STAGES if stage in stages]:
        raise GigamaskError(f"--stages must be in the order {order}, each once (got {names})")
    if unused := [stage for stage in steps if stage not in stages]:
        raise GigamaskError(f"--{unused[0]}-steps: --stages {names} has no stage {unused[0]}")
    if stages[0] == "mae" and config.model.pixels.has_window:
        raise GigamaskError(
            f"--stages {names}: the stage mae reads images of 8 bits, without --window and "
            "--percentiles; leave mae out, or convert the images to 8 bits"
        )
    if stages[0] == "mae" and config.init:
        raise GigamaskError(
            f"--init {config.init} would not be used: the stage mae starts from random weights and "
            "the later stages from mae; remove mae from --stages, or remove --init"
        )
    if stages[0] == "decoder" and not config.init:
        raise GigamaskError(
            "--stages decoder trains on a frozen encoder and needs its weights: give --init, or "
            "put mae first"
        )
