"""`gigamask demo`: the whole workflow at small scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gigamask.errors import check_range


@dataclass(frozen=True)
class DemoCommand:
    """train a small model on synthetic scenes, evaluate it and draw its predictions"""

    out: str = "runs/demo"
    """output folder; run the same command again to resume"""
    train_images: int = 960
    """number of training scenes"""
    test_images: int = 60
    """number of held-out scenes"""
    steps: int | None = None
    """number of training steps; default: enough for a useful model, in a few minutes"""
    json: str | None = None
    """write the results to this JSON file"""

    def run(self) -> dict[str, Any]:
        """Run the demo, and return the scores."""
        from gigamask.workflows import demo

        check_range("--train-images", self.train_images, 1)
        check_range("--test-images", self.test_images, 1)
        check_range("--steps", self.steps, 1)
        return demo.run(self.out, self.train_images, self.test_images, self.steps)
