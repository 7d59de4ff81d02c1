"""Check that a student can learn from a teacher, here or planned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import DECODER_PREFIX, MAEConfig, SamConfig, vit_h
from gigamask.models.initial_weights import CLASS_HEAD, DECODER
from gigamask.models.pretrained import load_sam
from gigamask.models.promptable import PromptableModel
from gigamask.models.weight_paths import may_be_weights
from gigamask.plugins.distill.teacher_weights import check_teacher
from gigamask.training.config import ImageTrainConfig


def planned_teacher(teacher: str, image_size: int = 1024) -> PromptableModel:
    """Return a teacher on the meta device, without values.

    Args:
        teacher: Its weights; SAM's ViT-H if they are not here.
        image_size: Side of the input of that ViT-H in pixels.
    """
    here = teacher and may_be_weights(teacher)
    config = load_sam(teacher).config if here else replace(vit_h(), image_size=image_size)
    with torch.device("meta"):
        return config.build()


def check_planned_teacher(teacher: str, config: ImageTrainConfig, model: nn.Module) -> list[str]:
    """Check that a student fits its teacher, which is SAM's ViT-H if its weights are not here.

    Args:
        teacher: The teacher's weights.
        config: The training.
        model: The student on the meta device.

    Returns:
        The error that is set aside if the teacher is missing.

    Raises:
        GigamaskError: They do not fit, or no teacher is named.
    """
    missing = ""
    try:
        check_teacher(teacher)
    except GigamaskError as error:
        if not teacher:
            raise
        missing = str(error)
    try:
        [frozen] = config.task(torch.device("meta")).frozen_models
        if config.init == f"{DECODER_PREFIX}{teacher}":
            own, taught = (_decoder_shapes(each) for each in (model, frozen))
            if own != taught:
                raise GigamaskError(f"{config.init}: its decoder has other sizes than the model's")
    except GigamaskError as error:
        if not missing:
            raise
        raise GigamaskError(f"{missing}; nor does SAM ViT-H fit: {error}") from None
    return [f"{missing}; planned with SAM ViT-H"] if missing else []


def _decoder_shapes(model: nn.Module) -> dict[str, torch.Size]:
    state = model.state_dict()
    return {
        name: value.shape
        for name, value in state.items()
        if name.startswith(DECODER) and not name.startswith(CLASS_HEAD)
    }


def check_student(student: SamConfig, teacher: SamConfig, source: str, features: bool) -> None:
    """Check that a student can learn from a teacher.

    Args:
        student: Configuration of the student.
        teacher: Configuration of the teacher.
        source: Where the teacher comes from, for errors.
        features: Whether it learns the teacher's embeddings, otherwise its answers.

    Raises:
        GigamaskError: The sizes do not fit.
    """
    side = teacher.image_size
    if student.image_size != side:
        raise GigamaskError(
            f"--teacher {source}: takes images of {side} pixels, the student of "
            f"{student.image_size}; use --model.image-size {side}"
        )
    if student.stretch != teacher.stretch:
        word = "stretch" if teacher.stretch else "no-stretch"
        raise GigamaskError(f"--teacher {source}: needs --model.{word} as it was trained")
    if student.in_channels != teacher.in_channels:
        raise GigamaskError(
            f"--teacher {source}: reads images of {teacher.in_channels} channels, the student of "
            f"{student.in_channels}; use --in-channels {teacher.in_channels}"
        )
    if not features:
        return
    shapes = [(each.embedding_channels, each.embedding_size) for each in (student, teacher)]
    if shapes[0] != shapes[1]:
        own, taught = (f"{channels} x {size} x {size}" for channels, size in shapes)
        raise GigamaskError(
            f"--teacher {source}: its embedding is {taught}, the student's {own}; the phase "
            "features needs equal ones (--model.patch-size, --model.embedding-dim), or use --phase "
            "prompts"
        )


def check_sami_teacher(student: MAEConfig, teacher: SamConfig, source: str) -> None:
    """Check that a masked autoencoder can learn from a teacher.

    Args:
        student: Configuration of the masked autoencoder.
        teacher: Configuration of the teacher.
        source: Where the teacher comes from, for errors.

    Raises:
        GigamaskError: The sizes do not fit.
    """
    if teacher.in_channels != 3:
        raise GigamaskError(
            f"--teacher {source}: reads images of {teacher.in_channels} channels, but a masked "
            "autoencoder RGB; choose another teacher"
        )
    channels = teacher.encoder.channels(teacher)
    if student.feature_channels != channels:
        raise GigamaskError(
            f"--teacher {source}: its embedding has {channels} channels; use "
            f"--model.feature-channels {channels} (got {student.feature_channels})"
        )
    if teacher.image_size < student.image_size or teacher.embedding_size < student.embedding_size:
        raise GigamaskError(
            f"--teacher {source}: takes images of {teacher.image_size} pixels as "
            f"{teacher.embedding_size} x {teacher.embedding_size} tokens, fewer than the model's "
            f"{student.image_size} pixels or {student.embedding_size} x {student.embedding_size} "
            "patches; choose a smaller --model.image-size or a larger --model.patch-size"
        )
