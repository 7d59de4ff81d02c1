"""Configuration of distillation: a small SAM learns from a larger one.

Imports no torch, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

from gigamask import recipes
from gigamask.data.sample_config import SampleConfig
from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import Task
from gigamask.models.configs import DECODER_PREFIX
from gigamask.plugins.distill.teacher_weights import check_teacher
from gigamask.training.config import ImageTrainConfig
from gigamask.training.optim import AdamW, MuonAdamW, WarmupCosine
from gigamask.training.sam_config import SamTrainConfig, check_cacheable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gigamask.training.planning_view import PlanningView
    from gigamask.types import RandomSpec


@dataclass(frozen=True)
class FeaturesStage:
    """The phase features, trained before the phase prompts."""

    steps: int = 0
    """steps of the phase features, in OUT/features, before that of prompts, in OUT/prompts; 0: the
    phase is left out"""
    batch_size: int = 64
    """its images per step over all processes"""
    lr: float = 1e-3
    """its peak learning rate; Muon's changes in proportion"""
    min_lr_ratio: float = 0.01
    """its final learning rate as a fraction of the peak, if the schedule is a cosine"""
    warmup_steps: int = 250
    """its warm-up, at most half of its steps, if the schedule is a cosine"""
    weight_decay: float = 0.01
    """its weight decay"""

    def __post_init__(self) -> None:
        check_range("--features.steps", self.steps, 0)
        check_range("--features.warmup-steps", self.warmup_steps, 0)
        check_range("--features.batch-size", self.batch_size, 1)
        check_range("--features.lr", self.lr, 0)
        check_range("--features.weight-decay", self.weight_decay, 0)
        check_range("--features.min-lr-ratio", self.min_lr_ratio, 0, 1)


@dataclass(frozen=True)
class Taught:
    """What trainings with a teacher have in common."""

    teacher: str = ""
    """weights of the teacher, a SAM: a run folder, a checkpoint, a .pth, a .safetensors, a Hugging
    Face folder or id, or starter"""

    @property
    def other_weights(self) -> tuple[str, ...]:
        """The teacher."""
        return (self.teacher,)

    def check_plan(self, model: nn.Module) -> list[str]:
        """Check that the student fits its teacher, or SAM's ViT-H if that is not here.

        Args:
            model: The student on the meta device.

        Returns:
            The error of training that is set aside: that of a missing teacher.

        Raises:
            GigamaskError: The sizes do not fit, or no teacher is named.
        """
        from gigamask.plugins.distill.teachers import check_planned_teacher

        return check_planned_teacher(self.teacher, cast(ImageTrainConfig, self), model)


@dataclass(frozen=True)
class DistillTrainConfig(Taught, SamTrainConfig):
    """Configuration of distillation."""

    command: ClassVar[str] = "distill"
    required: ClassVar[str] = "--teacher WEIGHTS"

    phase: Literal["features", "prompts"] = "prompts"
    """what the student learns: features, the teacher's embeddings, with its decoder frozen; or
    prompts, the teacher's masks in rounds of prompts"""
    features: FeaturesStage = field(default_factory=FeaturesStage)
    teacher_decoder: bool = True
    """start from the teacher's prompt encoder and mask decoder, unless --init is set; the student's
    must have the same sizes"""
    teacher_cache: str | None = None
    """folder that keeps the teacher's embeddings in float16, 2 MB an image for SAM, for every later
    visit and run; default: they are computed at every visit"""
    teacher_iou_weight: float = 0.0
    """phase prompts: weight of the squared difference between the predicted IoUs"""

    @property
    def unused(self) -> dict[str, str]:  # pyrefly: ignore[bad-override]
        """Why values have no effect, by flag without dashes."""
        stage, others = self.features, list[str]()
        with suppress(GigamaskError):  # of a recipe elsewhere
            if getattr(recipes.make(self.recipe), "phase", "") == self.phase == "features":
                others = ["prompts", "loss", "masks-per-chunk", "mining", "teacher-iou-weight"]
                others += [f"prompts.{each.name}" for each in fields(self.prompts)]
                others += [f"loss.{each.name}" for each in fields(self.loss)]
                others.append("loader.max-masks")
        found = dict.fromkeys(others, "the phase features has no prompts")
        if not stage.steps and stage != FeaturesStage():
            ours = (f"features.{each.name}" for each in fields(stage))
            found |= dict.fromkeys(ours, "--features.steps is 0")
        return super().unused | {flag.replace("_", "-"): why for flag, why in found.items()}

    def phases(self) -> list[DistillTrainConfig]:
        """Return the phases to train one after the other, with initial weights and frozen modules.

        With `features.steps`, the phase features comes before the phase prompts, each in its own
        folder in `out`.
        """
        init = self.init
        if init is None and self.teacher and self.teacher_decoder:
            init = f"{DECODER_PREFIX}{self.teacher}"
        stage = self.features
        last = replace(self, features=FeaturesStage(steps=0), init=init)
        if self.phase == "features":
            freeze = tuple(dict.fromkeys([*self.freeze, "prompt_encoder", "mask_decoder"]))
            return [replace(last, freeze=freeze)]
        if not stage.steps:
            return [last]
        schedule, optimizer = self.schedule, self.optimizer
        if isinstance(optimizer, MuonAdamW):
            optimizer = replace(optimizer, muon_lr=optimizer.muon_lr * stage.lr / optimizer.lr)
        optimizer = replace(optimizer, lr=stage.lr)
        if isinstance(schedule, WarmupCosine):
            warmup = min(stage.warmup_steps, stage.steps // 2)
            schedule = replace(schedule, warmup_steps=warmup, min_lr_ratio=stage.min_lr_ratio)
        if isinstance(optimizer, AdamW):
            optimizer = replace(optimizer, weight_decay=stage.weight_decay)
        folder = Path(self.out)
        features = replace(
            last,
            phase="features",
            out=str(folder / "features"),
            steps=stage.steps,
            batch_size=stage.batch_size,
            optimizer=optimizer,
            schedule=schedule,
        )
        prompts = replace(last, out=str(folder / "prompts"), init=features.out)
        return [*features.phases(), prompts]

    def check(self) -> DistillTrainConfig:
        """Check the values and return the configuration itself.

        Raises:
            GigamaskError: A value is invalid.
        """
        check_range("--teacher-iou-weight", self.teacher_iou_weight, 0)
        if self.compile:
            raise GigamaskError("--compile is for 'gigamask train'; leave the flag out")
        if self.model.class_names:
            raise GigamaskError(
                "--classes is for 'gigamask train', since a teacher of other classes has no "
                "answer; distill first, then train with --init"
            )
        if self.embedding_cache:
            raise GigamaskError(
                "--embedding-cache is for 'gigamask train'; use --teacher-cache, or leave it out"
            )
        if self.teacher_cache:
            check_cacheable(self.loader, "--teacher-cache")
        super().check()
        return self

    def check_inputs(self, earlier: Collection[str] = ()) -> None:
        """Check, before training starts, that teacher, data and weights exist.

        Args:
            earlier: Run folders of earlier stages, which `init` may name before they exist.

        Raises:
            GigamaskError: Something is missing, or the student does not fit the teacher.
        """
        check_teacher(self.teacher)
        from gigamask.models.pretrained import load_sam
        from gigamask.plugins.distill.teachers import check_student

        teacher = load_sam(self.teacher).config
        check_student(self.model, teacher, self.teacher, self.phase == "features")
        super().check_inputs(earlier)

    def task(self, device: torch.device) -> Task:
        """Return the task of the phase; on the meta device, with a teacher without values."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.models.embedding_cache import EmbeddingCache
        from gigamask.models.pretrained import load_sam
        from gigamask.plugins.distill.distillation import FeatureTask, PromptTask, Teacher
        from gigamask.plugins.distill.teachers import check_student, planned_teacher

        precision, cache = choose_precision(self.precision, device), None
        is_planned = device.type == "meta"
        if self.teacher_cache and not is_planned:
            cache = EmbeddingCache(Path(self.teacher_cache), limit_bytes=None, half=True)
        if is_planned:
            model = planned_teacher(self.teacher, self.model.image_size)
            name = self.teacher or "of ViT-H"
            check_student(self.model, model.config, name, self.phase == "features")
        else:
            model = load_sam(self.teacher)
        teacher = Teacher(model.to(device), precision, cache)
        if self.phase == "features":
            return FeatureTask(teacher, precision)
        return PromptTask(
            **vars(super().task(device)), teacher=teacher, iou_weight=self.teacher_iou_weight
        )

    @property
    def planning(self) -> PlanningView:
        """The configuration as `gigamask plan` sees it."""
        from gigamask.training.planning_view import PlanningView

        return PlanningView(self) if self.phase == "features" else super().planning

    @property
    def items(self) -> Literal["image", "mask"]:
        """Unit of sampling: in the phase features, images."""
        return "image" if self.phase == "features" else super().items

    @property
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries."""
        spec = super().random_spec
        return replace(spec, clicks=0, points=0) if self.phase == "features" else spec

    @property
    def sample_config(self) -> SampleConfig:
        """How the loader builds samples: in the phase features, images without masks."""
        config = super().sample_config
        if self.phase == "features":
            return replace(config, mask_size=1, with_masks=False, mask_store=None)
        return config
