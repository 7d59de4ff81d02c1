"""`gigamask follow`: one sample, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from gigamask.errors import GigamaskError
from gigamask.parser import Positional
from gigamask.workflows.open_data import open_sample


@dataclass(frozen=True)
class FollowCommand:
    """trace one sample through the nine steps of training: type, shape, time and bytes at each"""

    sample: Annotated[str, Positional("SAMPLE")]
    """TAR:IMAGE, with the image's name (sa_1) or image_id (1)"""
    recipe: str = "tiny"
    """recipe whose model and settings are used"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Trace the sample, and return a record of each step."""
        from gigamask import recipes
        from gigamask.training.sam_config import SamTrainConfig

        with open_sample(self.sample) as (index, row):
            config = recipes.make(self.recipe)
            if not isinstance(config, SamTrainConfig):
                raise GigamaskError(
                    f"--recipe {self.recipe} does not train SAM; choose tiny or another recipe of "
                    "'gigamask train'"
                )
            from gigamask.workflows import follow

            steps = follow.follow(index, row, config)
        return {"steps": steps}
