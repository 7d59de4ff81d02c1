"""`gigamask evaluate`: the scores of weights on shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from gigamask.verbs.opening import opened


@dataclass(frozen=True)
class Verb:
    """scores weights on shards: mean IoU after 1, 2, 3, 5 and 9 clicks, best of three masks, and for a box; of fine, medium and coarse masks too"""

    weights: Positional[str]
    """a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    min_predicted_iou: float | None = None
    """only masks whose annotation has at least this predicted_iou"""
    images: int | None = None
    """only the first so many images"""
    feed_mask: bool = True
    """feed the previous answer back with each further click"""
    device: str = "auto"
    """auto is cuda when there is one"""
    pictures: str | None = None
    """folder for sheets of the best, worst and typical answers"""
    json: str | None = None
    """file for the scores, as data"""

    def run(self) -> dict[str, Any]:
        from rich.progress import track

        from gigamask.data.choose import Filters
        from gigamask.evaluate import interactive, pictures
        from gigamask.train.checkpoint import load_model

        model = load_model(self.weights, self.device)
        with opened(self.data) as index:
            rows = range(len(index) if self.images is None else min(self.images, len(index)))
            filters = Filters(max_area=None, min_predicted_iou=self.min_predicted_iou)
            seen = track(rows, "evaluate", transient=True)
            result = interactive.measure(model, index, filters, interactive.Protocol(feed_mask=self.feed_mask), seen)
            summary = result.summary() | {"weights": self.weights, "data": list(self.data), "rejected": result.rejected}
            print(interactive.table(summary))
            for reason in result.rejected:
                print(f"  left out {reason}")
            if self.pictures:
                for path in pictures.write_sheets(model, index, result, Path(self.pictures)):
                    print(path)
        return summary
