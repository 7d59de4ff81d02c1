"""`gigamask demo`: everything at once, small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DemoCommand:
    """makes scenes, trains the tiny model on them, evaluates it on scenes it never saw, and draws its answers"""

    out: str = "runs/demo"
    """where everything goes"""
    train_images: int = 1600
    """scenes to train on"""
    test_images: int = 60
    """held-out scenes"""
    steps: int | None = None
    """updates; the recipe's own number by default"""
    json: str | None = None
    """file for what was printed, as data"""

    def run(self) -> dict[str, Any]:
        from gigamask.training.config import check_at_least
        from gigamask.workflows import demo

        check_at_least(
            1,
            train_images=self.train_images,
            test_images=self.test_images,
            **({} if self.steps is None else {"steps": self.steps}),
        )
        return demo.run(self.out, self.train_images, self.test_images, self.steps)
