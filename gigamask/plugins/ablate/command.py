"""`gigamask ablate`: compare variants of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from gigamask.errors import GigamaskError
from gigamask.parser import Positional


@dataclass(frozen=True)
class AblateCommand:
    """compare variants of a recipe: same data and budget, several seeds, one table of scores"""

    table: Annotated[str, Positional("TABLE")]
    """samplers, losses, masks, prompts, mining, or a YAML file of variants: the flags of
    'gigamask train' as a list ('variant: [--flag, value]') or a mapping ('variant: {flag:
    value}')"""
    data: tuple[str, ...]
    """training data: tars, folders of tars, globs, or an index"""
    test: tuple[str, ...]
    """held-out data to evaluate on"""
    out: str
    """output folder: VARIANT/seed_K, ablation.md and ablation.json; run the same command again to
    resume"""
    recipe: str = "tiny"
    """recipe that the variants change"""
    steps: int | None = None
    """steps per run; default: the recipe's"""
    cpu_minutes: float | None = None
    """in place of --steps: CPU minutes per run, which become steps of each variant by the CPU time
    of a few of its steps; that is measured first and kept in --out"""
    seeds: int = 3
    """runs per variant, with seeds 0, 1, ..."""
    parallel_runs: int = 1
    """number of runs to train in parallel, sharing the CPU cores or the GPU"""
    max_images: int | None = None
    """number of test images to use, the first in the order of their paths; default: all"""
    min_predicted_iou: float | None = None
    """evaluate only on masks with at least this predicted_iou in their annotation"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Train and evaluate all variants, and return the scores."""
        from gigamask.data.index import find_tars
        from gigamask.plugins.ablate.tables import load_table

        load_table(self.table)
        for flag, paths in (("data", self.data), ("test", self.test)):
            if not paths:
                raise GigamaskError(f"--{flag} is required: a tar, a folder of tars or an index")
            find_tars(paths)
        from gigamask.plugins.ablate import ablation
        from gigamask.plugins.ablate.budget import Budget

        budget = Budget(self.steps, self.cpu_minutes)
        test = ablation.TestSet(self.test, self.max_images, self.min_predicted_iou)
        return ablation.run(
            self.table,
            self.recipe,
            self.data,
            test,
            self.out,
            budget,
            self.seeds,
            self.parallel_runs,
        )
