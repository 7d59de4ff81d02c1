"""`gigamask follow`: one real sample, door by door."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from gigamask.faults import Fault
from gigamask.verbs.opening import opened


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

        tar, colon, name = self.sample.rpartition(":")
        if not colon:
            raise Fault(f"{self.sample!r} names no sample; write TAR:IMAGE, such as {self.sample}:0")
        with opened([tar]) as index:
            doors = follow.follow(index, index.find(f"{Path(tar).name}:{name}"), recipes.find(self.recipe)())
        return {"doors": doors}
