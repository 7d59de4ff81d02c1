"""The run that trains a promptable segmenter: what it has beside every run's.

Imports no torch, so that `--help` answers at once.

Not here: what a step computes (`train.tasks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gigamask.data.choose import Choice, Filters, RandomChoice
from gigamask.data.settings import Assembly
from gigamask.faults import Fault
from gigamask.losses.mining import EveryMask
from gigamask.losses.objective import MaskObjective
from gigamask.model.sizes import SamSpec
from gigamask.prompts.policy import InteractiveSchedule
from gigamask.seams import Mining, Objective, Policy, Task
from gigamask.train.run import ImageLoading, ImageRun, at_least

if TYPE_CHECKING:
    import torch

    from gigamask.contracts import Chance
    from gigamask.model.sam import Sam
    from gigamask.train.planning_view import MaskPlanningView


@dataclass(frozen=True)
class Loading(ImageLoading):
    """How images with their masks become samples."""

    items: Literal["image", "mask"] = "image"
    """what is sampled: images, each with several masks, or single masks, each with its image"""
    max_masks: int = 64
    """masks of an image that are trained on"""
    filters: Filters = field(default_factory=Filters)
    choice: Choice = field(default_factory=RandomChoice)
    target: Literal["hard", "area", "full"] = "hard"
    """what loss and clicks see: on the low-resolution grid the mask at cell centres or each cell's covered share, or the mask in full on the input"""
    mask_store: str | None = None
    """folder that 'gigamask masks' made: masks are read from it instead of each image's json"""


@dataclass(frozen=True)
class Segmentation(ImageRun):
    """Everything that decides what SAM's training does."""

    masks_per_chunk: int = 64
    """masks that pass through the decoder at once; gradients do not depend on it, memory does"""
    recompute: int = 0
    """every n-th block of the encoder forgets its activations and computes them again in the backward pass; 0 is off"""
    model: SamSpec = field(default_factory=SamSpec)
    loading: Loading = field(default_factory=Loading)
    policy: Policy = field(default_factory=InteractiveSchedule)
    objective: Objective = field(default_factory=MaskObjective)
    mining: Mining = field(default_factory=EveryMask)

    def check(self) -> Segmentation:
        """Returns the run itself when its numbers can be trained with; raises `Fault` otherwise."""
        at_least(1, **{"masks_per_chunk": self.masks_per_chunk, "loading.max_masks": self.loading.max_masks})
        at_least(0, recompute=self.recompute)
        if "image_encoder" in self.freeze and not self.init and not self.model.encoder.pretrained:
            raise Fault("--freeze image_encoder keeps an encoder that has not learned anything; give --init, the weights to start from")
        return super().check()

    def build(self, device: str = "cpu") -> Sam:
        """Returns the model that the seed names, not yet trained; on the meta device one without numbers."""
        from gigamask.model.start import build
        from gigamask.parallel.recompute import recompute_blocks

        model = build(self.model, self.seed, device)
        blocks = model.encoder_blocks
        if self.recompute and not blocks:
            raise Fault(f"--recompute {self.recompute}: {type(self.model.encoder).__name__} names no blocks of its encoder; leave it out")
        recompute_blocks(blocks, self.recompute)
        return model

    def task(self, device: torch.device) -> Task:
        """Returns what a step computes: rounds of prompts on every mask."""
        from gigamask.parallel.precision import choose_precision
        from gigamask.train.tasks import SamTask

        mining = None if isinstance(self.mining, EveryMask) else self.mining
        precision, full = choose_precision(self.precision, device), self.loading.target == "full"
        return SamTask(self.policy, self.objective, self.masks_per_chunk, precision, full, mining)

    @property
    def items(self) -> Literal["image", "mask"]:
        """What is sampled: images, or single masks."""
        return self.loading.items

    @property
    def strata(self) -> bool:
        """Whether mining looks within the sampler's strata."""
        return self.mining.by_sampler

    @property
    def planning(self) -> MaskPlanningView:
        """What `plan` has to know of the run besides its step."""
        from gigamask.train.planning_view import MaskPlanningView

        return MaskPlanningView.of(self)

    @property
    def chance(self) -> Chance:
        """How many random numbers a sample carries."""
        from gigamask.contracts import Chance

        return Chance(seed=self.seed, clicks=self.policy.draws, blocks=self.model.encoder.drop_path_blocks(self.model), points=self.objective.draws)

    @property
    def assembly(self) -> Assembly:
        """How the loader makes samples for this model: what is not cut at cell centres is cut from masks at the input's resolution."""
        side, loading = self.model.input_side, self.loading
        return Assembly(
            side=side,
            grid=self.model.grid if loading.target == "hard" else side,
            max_masks=loading.max_masks,
            filters=loading.filters,
            choice=loading.choice,
            augment=loading.augment,
            colour=loading.colour,
            half_scale=loading.half_scale,
            mask_store=loading.mask_store,
        )
