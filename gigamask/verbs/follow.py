"""`gigamask follow`: one real sample, door by door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tyro.conf import Positional

from gigamask.verbs.opening import opened_sample


@dataclass(frozen=True)
class Verb:
    """carries one real sample through the nine doors of training and prints type, shape, time and bytes at each"""

    sample: Positional[str]
    """TAR:IMAGE, the image by name (sa_1) or by its image_id (1)"""
    recipe: str = "tiny"
    """the recipe whose model and settings are used"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask import follow, recipes

        with opened_sample(self.sample) as (index, row):
            doors = follow.follow(index, row, recipes.find(self.recipe)())
        return {"doors": doors}
