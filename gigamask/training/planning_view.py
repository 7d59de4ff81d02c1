"""Training configurations as `gigamask plan` sees them.

Configurations are annotated as `Any` here, since their modules import this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gigamask.interfaces import NoMining, PromptSchedule
from gigamask.models.configs import ViT


@dataclass(frozen=True)
class PlanningView:
    """A training configuration without masks, as `plan` sees it.

    Attributes:
        run: The configuration.
        masks_per_image: Largest number of masks per image to train on.
        masks_per_chunk: Masks per forward pass of the decoder.
        uses_mining: Whether a forward pass over all masks selects those to train on.
        activation_checkpointing: N if every n-th encoder block is recomputed; 0 if none is.
    """

    run: Any
    masks_per_image: int = 0
    masks_per_chunk: int = 0
    uses_mining: bool = False
    activation_checkpointing: int = 0

    def measured_config(
        self, abridge: Callable[[PromptSchedule], PromptSchedule], recompute: bool = True
    ) -> Any:
        """Return the configuration whose step is measured.

        Args:
            abridge: Returns a prompt schedule with only the rounds that need the most memory.
            recompute: Whether encoder blocks are recomputed as configured, or not at all.
        """
        return self.run

    def memory_flags(self, micro: int) -> list[list[tuple[str, dict[str, Any]]]]:
        """Return the flags that save memory.

        Args:
            micro: Images in a micro-batch.

        Returns:
            Groups of flags, each ordered from mildest to strongest: the flag as typed, and the
            fields that it changes.
        """
        return []

    def smaller_config(self, known: Any) -> tuple[Literal["encoder", "rounds"], Any] | None:
        """Return a smaller configuration whose measurement suffices to plan this one.

        Args:
            known: A configuration that has been measured and differs from this one.

        Returns:
            The phase to measure (the other phase is as in `known`) and the smaller configuration;
            None if this configuration itself must be measured.
        """
        return None


@dataclass(frozen=True)
class MaskPlanningView(PlanningView):
    """A SAM training configuration, as `plan` sees it."""

    @classmethod
    def from_config(cls, run: Any) -> MaskPlanningView:
        """Return the view of a configuration."""
        masks = 1 if run.items == "mask" else run.loader.max_masks
        return cls(
            run,
            masks,
            run.masks_per_chunk,
            not run.mining.keeps_all,
            run.activation_checkpointing,
        )

    def measured_config(
        self, abridge: Callable[[PromptSchedule], PromptSchedule], recompute: bool = True
    ) -> Any:
        """Return the configuration with fewer rounds and without mining.

        Args:
            abridge: Returns a prompt schedule with only the rounds that need the most memory.
            recompute: Whether encoder blocks are recomputed as configured, or not at all.
        """
        return replace(
            self.run,
            prompts=abridge(self.run.prompts),
            mining=NoMining(),
            activation_checkpointing=self.activation_checkpointing if recompute else 0,
        )

    def memory_flags(self, micro: int) -> list[list[tuple[str, dict[str, Any]]]]:
        """Return flags for smaller chunks of masks and for more recomputed blocks."""
        masks = min(self.masks_per_chunk, self.masks_per_image * micro)
        chunks = [count for count in (32, 16, 4) if count < masks][-2:]
        is_trained = "image_encoder" not in self.run.freeze or self.run.lora.rank
        finer = [n for n in (4, 2, 1) if is_trained and not 0 < self.activation_checkpointing <= n]
        return [
            [(f"--masks-per-chunk {count}", {"masks_per_chunk": count}) for count in chunks],
            [(f"--activation-checkpointing {n}", {"activation_checkpointing": n}) for n in finer],
        ]

    def smaller_config(self, known: Any) -> tuple[Literal["encoder", "rounds"], Any] | None:
        """Return a configuration with one mask, or one encoder block, if that part is known."""
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
        # The memory of the rounds does not depend on the depth of the encoder.
        blocks_frozen = any("blocks" in part for part in (*run.freeze, *run.unfreeze))
        if (
            run.activation_checkpointing == known_view.activation_checkpointing
            and type(run.model.encoder) is ViT
            and not blocks_frozen
        ):
            return "rounds", replace(run, model=replace(run.model, depth=1, global_attn_indexes=()))
        return None
