"""The run that trains a promptable segmenter: what it has beside every run's.

Imports no torch, so that `--help` answers at once.

Not here: what a step computes (`train.tasks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gigamask.data.mask_sampling import MaskFilters, MaskSampler, RandomMasks
from gigamask.data.sample_config import SampleConfig
from gigamask.errors import GigamaskError
from gigamask.interfaces import Loss, Mining, PromptSchedule, Task
from gigamask.losses.ohem import NoMining
from gigamask.losses.sam_loss import SamLoss
from gigamask.models.configs import SamConfig
from gigamask.prompts.schedule import InteractiveSchedule
from gigamask.training.config import ImageTrainConfig, LoaderConfig, check_at_least

if TYPE_CHECKING:
    import torch

    from gigamask.models.sam.sam import Sam
    from gigamask.training.planning_view import MaskPlanningView
    from gigamask.types import RandomSpec


@dataclass(frozen=True)
class SamLoaderConfig(LoaderConfig):
    """How images with their masks become samples."""

    items: Literal["image", "mask"] = "image"
    """what is sampled: images, each with several masks, or single masks, each with its image"""
    max_masks: int = 64
    """masks of an image that are trained on"""
    filters: MaskFilters = field(default_factory=MaskFilters)
    mask_sampler: MaskSampler = field(default_factory=RandomMasks)
    target: Literal["hard", "area", "full"] = "hard"
    """what loss and clicks see: on the low-resolution grid the mask at cell centres or each cell's covered share, or the mask in full on the input"""
    mask_store: str | None = None
    """folder that 'gigamask masks' made: masks are read from it instead of each image's json"""


@dataclass(frozen=True)
class SamTrainConfig(ImageTrainConfig):
    """Everything that decides what SAM's training does."""

    masks_per_chunk: int = 64
    """masks that pass through the decoder at once; gradients do not depend on it, memory does"""
    activation_checkpointing: int = 0
    """every n-th block of the encoder forgets its activations and computes them again in the backward pass; 0 is off"""
    model: SamConfig = field(default_factory=SamConfig)
    loader: SamLoaderConfig = field(default_factory=SamLoaderConfig)
    prompts: PromptSchedule = field(default_factory=InteractiveSchedule)
    loss: Loss = field(default_factory=SamLoss)
    mining: Mining = field(default_factory=NoMining)

    def check(self) -> SamTrainConfig:
        """Returns the run itself when its numbers can be trained with; raises `GigamaskError` otherwise."""
        check_at_least(
            1,
            **{"masks_per_chunk": self.masks_per_chunk, "loader.max_masks": self.loader.max_masks},
        )
        check_at_least(0, recompute=self.activation_checkpointing)
        if "image_encoder" in self.freeze and not self.init and not self.model.encoder.pretrained:
            raise GigamaskError(
                "--freeze image_encoder keeps an encoder that has not learned anything; give --init, the weights to start from"
            )
        return super().check()

    def build(self, device: str = "cpu") -> Sam:
        """Returns the model that the seed names, not yet trained; on the meta device one without numbers."""
        from gigamask.distributed.activation_checkpointing import checkpoint_blocks
        from gigamask.models.init import build_model

        model = build_model(self.model, self.seed, device)
        blocks = model.encoder_blocks
        if self.activation_checkpointing and not blocks:
            raise GigamaskError(
                f"--activation-checkpointing {self.activation_checkpointing}: {type(self.model.encoder).__name__} names no blocks of its encoder; leave it out"
            )
        checkpoint_blocks(blocks, self.activation_checkpointing)
        return model

    def task(self, device: torch.device) -> Task:
        """Returns what a step computes: rounds of prompts on every mask."""
        from gigamask.distributed.precision import choose_precision
        from gigamask.training.tasks import SamTask

        mining = None if isinstance(self.mining, NoMining) else self.mining
        precision, full = choose_precision(self.precision, device), self.loader.target == "full"
        return SamTask(self.prompts, self.loss, self.masks_per_chunk, precision, full, mining)

    @property
    def items(self) -> Literal["image", "mask"]:
        """What is sampled: images, or single masks."""
        return self.loader.items

    @property
    def strata(self) -> bool:
        """Whether mining looks within the sampler's strata."""
        return self.mining.by_sampler

    @property
    def planning(self) -> MaskPlanningView:
        """What `plan` has to know of the run besides its step."""
        from gigamask.training.planning_view import MaskPlanningView

        return MaskPlanningView.of(self)

    @property
    def random_spec(self) -> RandomSpec:
        """How many random numbers a sample carries."""
        from gigamask.types import RandomSpec

        return RandomSpec(
            seed=self.seed,
            clicks=self.prompts.num_uniforms,
            blocks=self.model.encoder.drop_path_blocks(self.model),
            points=self.loss.num_uniforms,
        )

    @property
    def sample_config(self) -> SampleConfig:
        """How the loader makes samples for this model: what is not cut at cell centres is cut from masks at the input's resolution."""
        side, loading = self.model.image_size, self.loader
        return SampleConfig(
            image_size=side,
            mask_size=self.model.mask_size if loading.target == "hard" else side,
            max_masks=loading.max_masks,
            filters=loading.filters,
            mask_sampler=loading.mask_sampler,
            augment=loading.augment,
            color_jitter=loading.color_jitter,
            half_scale=loading.half_scale,
            mask_store=loading.mask_store,
        )
