"""`gigamask ablate`: which of some variants trains best, under one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg


@dataclass(frozen=True)
class AblateCommand:
    """trains a table of variants under one budget, several seeds each, and prints their scores side by side"""

    table: Positional[Annotated[str, arg(metavar="TABLE")]]
    """samplers, losses, masks, prompts, mining, or a YAML file of 'variant: [--flag, value]' or 'variant: {flag: value}', as train has them"""
    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index to train on"""
    test: tuple[str, ...]
    """held-out ones to score on"""
    out: str
    """where everything goes: VARIANT/seed_K, ablation.md, ablation.json; the same command goes on with what is missing there"""
    recipe: str = "tiny"
    """what the variants are variants of"""
    steps: int | None = None
    """updates of each training; the recipe's own number by default"""
    seeds: int = 3
    """trainings of each variant; a seed names weights, order, masks and prompts"""
    at_once: int = 1
    """trainings side by side, which share the processor's cores or the GPU"""
    images: int | None = None
    """score on the first so many images only"""
    min_predicted_iou: float | None = None
    """score on masks only whose annotation has at least this predicted_iou"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.workflows import ablate

        test = ablate.HeldOut(self.test, self.images, self.min_predicted_iou)
        return ablate.run(
            self.table, self.recipe, self.data, test, self.out, self.steps, self.seeds, self.at_once
        )
