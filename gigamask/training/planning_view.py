"""What `gigamask plan` must know of a configuration besides its step: masks, and flags that save memory.

Configurations are annotated as `Any` here, since their modules import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gigamask.interfaces import PromptSchedule
from gigamask.losses.ohem import NoMining
from gigamask.models.configs import ViT


@dataclass(frozen=True)
class PlanningView:
    """A training that uses no masks, as `plan` sees it."""

    run: Any
    masks_per_image: int = 0
    """masks of an image that are trained on, where it has so many"""
    masks_per_chunk: int = 0
    """masks that pass through the decoder at once"""
    mines: bool = False
    """whether a forward pass over all masks selects those that are trained on"""
    activation_checkpointing: int = 0
    """every how many-th encoder block is recomputed in the backward pass; 0: none"""

    def measured(
        self, abridge: Callable[[PromptSchedule], PromptSchedule], recompute: bool = True
    ) -> Any:
        """Return the run whose step is measured.

        Args:
            abridge: returns a prompt schedule that plays only the rounds that hold most memory.
            recompute: whether encoder blocks are recomputed, as the run says.
        """
        return self.run

    def memory_flags(self, micro: int) -> list[list[tuple[str, dict[str, Any]]]]:
        """Return the flags that save memory.

        Args:
            micro: images in a micro-batch.

        Returns:
            Families of flags, each from the mildest to the strongest: the flag as it is typed,
            and the fields that it changes.
        """
        return []

    def reduced(self, known: Any) -> tuple[Literal["encoder", "rounds"], Any] | None:
        """Return a smaller run whose measurement suffices to plan this one, if there is one.

        Args:
            known: a run that has been measured already and differs from this one.

        Returns:
            The phase that must be measured (the other's figures are those of `known`) and the
            smaller run; None: this run itself must be measured.
        """
        return None


@dataclass(frozen=True)
class MaskPlanningView(PlanningView):
    """A SAM training as `plan` sees it."""

    run: Any

    @classmethod
    def of(cls, run: Any) -> MaskPlanningView:
        """Return the view of a run."""
        masks = 1 if run.items == "mask" else run.loader.max_masks
        return cls(
            run,
            masks,
            run.masks_per_chunk,
            not isinstance(run.mining, NoMining),
            run.activation_checkpointing,
        )

    def measured(
        self, abridge: Callable[[PromptSchedule], PromptSchedule], recompute: bool = True
    ) -> Any:
        """Return the run with abridged rounds, every mask trained on."""
        every = self.activation_checkpointing if recompute else 0
        return replace(
            self.run,
            prompts=abridge(self.run.prompts),
            mining=NoMining(),
            activation_checkpointing=every,
        )

    def memory_flags(self, micro: int) -> list[list[tuple[str, dict[str, Any]]]]:
        """Return smaller chunks of masks, and more blocks that are recomputed."""
        masks = min(self.masks_per_chunk, self.masks_per_image * micro)
        chunks = [count for count in (32, 16, 4) if count < masks][-2:]
        learns = "image_encoder" not in self.run.freeze
        finer = [n for n in (4, 2, 1) if learns and not 0 < self.activation_checkpointing <= n]
        return [
            [(f"--masks-per-chunk {count}", {"masks_per_chunk": count}) for count in chunks],
            [(f"--activation-checkpointing {n}", {"activation_checkpointing": n}) for n in finer],
        ]

    def reduced(self, known: Any) -> tuple[Literal["encoder", "rounds"], Any] | None:
        """Return a run of one mask, or of one encoder block, where only the other part differs."""
        run, known_view = self.run, known.planning
        if (
            not isinstance(known_view, MaskPlanningView)
            or run.micro_batch_size != known.micro_batch_size
        ):
            return None
        if self.masks_per_chunk == known_view.masks_per_chunk:
            return "encoder", replace(
                run, masks_per_chunk=1, loader=replace(run.loader, max_masks=1)
            )
        # The rounds' memory does not depend on the encoder's depth.
        blocks_frozen = any("blocks" in part for part in run.freeze)
        if (
            run.activation_checkpointing == known_view.activation_checkpointing
            and type(run.model.encoder) is ViT
            and not blocks_frozen
        ):
            return "rounds", replace(run, model=replace(run.model, depth=1, global_attn_indexes=()))
        return None
