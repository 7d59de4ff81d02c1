"""`gigamask follow`: one real sample, door by door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from gigamask.cli.commands.opening import opened_sample
from gigamask.errors import GigamaskError


@dataclass(frozen=True)
class FollowCommand:
    """carries one real sample through the nine doors of training and prints type, shape, time and bytes at each"""

    sample: Positional[Annotated[str, arg(metavar="SAMPLE")]]
    """TAR:IMAGE, the image by name (sa_1) or by its image_id (1)"""
    recipe: str = "tiny"
    """the recipe whose model and settings are used"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import recipes
        from gigamask.training.sam_config import SamTrainConfig
        from gigamask.workflows import follow

        with opened_sample(self.sample) as (index, row):
            run = recipes.make(self.recipe)
            if not isinstance(run, SamTrainConfig):
                raise GigamaskError(
                    f"--recipe {self.recipe} trains no segmentation, there are no doors to follow; choose tiny, or a recipe of 'train'"
                )
            doors = follow.follow(index, row, run)
        return {"doors": doors}
