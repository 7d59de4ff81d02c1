"""`gigamask evaluate`: the scores of weights on shards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from gigamask.verbs.opening import opened


@dataclass(frozen=True)
class Verb:
    """scores weights on shards: mean IoU by clicks, best of three masks, box; granularities, sizes, calibration; boundaries and AR if asked"""

    weights: Positional[Annotated[str, arg(metavar="WEIGHTS")]]
    """a run folder, a checkpoint, an official .pth, a .safetensors, or a Hugging Face folder"""
    data: tuple[str, ...]
    """tars, folders of tars, globs, or an index"""
    min_predicted_iou: float | None = None
    """only masks whose annotation has at least this predicted_iou"""
    images: int | None = None
    """only the first so many images"""
    feed_mask: bool = True
    """feed the previous answer back with each further click"""
    batch: int = 4
    """images that are embedded at once; a matter of speed and memory alone"""
    device: str = "auto"
    """auto is cuda when there is one"""
    boundaries: bool = False
    """score the answers' boundaries, too: Boundary IoU and DAVIS's F"""
    automatic: bool = False
    """also segment everything in each image, and say how much of the truth is among that: AR@1000"""
    points_per_side: int = 32
    """of the grid of points for --automatic; the paper took 64"""
    pictures: str | None = None
    """folder for sheets of the best, worst and typical answers"""
    html: str | None = None
    """file for the scores as one page, with the pictures if there are any"""
    json: str | None = None
    """file for the scores, as data"""

    def run(self) -> dict[str, Any]:
        from rich.progress import track

        from gigamask.data.choose import Filters
        from gigamask.evaluate import automatic, interactive, page, pictures
        from gigamask.train.checkpoint import load_model

        settings = automatic.proposals(self.points_per_side)
        model = load_model(self.weights, self.device)
        with opened(self.data) as index:
            rows = range(len(index) if self.images is None else min(self.images, len(index)))
            filters = Filters(max_area=None, min_predicted_iou=self.min_predicted_iou)
            protocol = interactive.Protocol(feed_mask=self.feed_mask, boundaries=self.boundaries)
            seen = track(rows, "evaluate", transient=True)
            search = automatic.Search(settings)
            result = interactive.measure(model, index, filters, protocol, seen, self.batch, [search.look] if self.automatic else [])
            summary = result.summary() | {"weights": self.weights, "data": list(self.data), "rejected": result.rejected}
            print(interactive.table(summary))
            if self.automatic:
                summary["automatic"] = search.summary()
                print(automatic.table(summary["automatic"]))
            for reason in result.rejected:
                print(f"  left out {reason}")
            sheets = pictures.write_sheets(model, index, result, Path(self.pictures)) if self.pictures else []
            for path in sheets:
                print(path)
            if self.html:
                Path(self.html).write_text(page.page(summary, sheets))
                print(self.html)
        return summary
