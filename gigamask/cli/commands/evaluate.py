"""`gigamask evaluate`: the scores of weights on shards, by one process or several of torchrun."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from gigamask.cli.commands.opening import opened

if TYPE_CHECKING:
    from gigamask.data.index import Index
    from gigamask.distributed.world import World
    from gigamask.evaluation.clicks import ClickResult
    from gigamask.evaluation.proposals import ProposalRecall
    from gigamask.models.sam.sam import Sam


@dataclass(frozen=True)
class EvaluateCommand:
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
    batch_size: int = 4
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

    def run(self) -> dict[str, Any] | None:
        from gigamask.distributed.precision import choose_device
        from gigamask.distributed.world import destroy_world, init_world
        from gigamask.parser import check_writable
        from gigamask.training.config import check_at_least

        check_at_least(1, **({} if self.images is None else {"images": self.images}))
        check_writable("--html", self.html)
        world = init_world(os.environ, choose_device(self.device))
        try:
            return self._look(world)
        finally:
            destroy_world(world)

    def _look(self, world: World) -> dict[str, Any] | None:
        """Returns and prints what all processes find together, in the first of them; None in the others."""
        from rich.progress import track

        from gigamask.data.mask_sampling import MaskFilters
        from gigamask.evaluation import clicks, proposals

        with ExitStack() as stack:
            model, index, search = world.in_turn(lambda: self._begin(stack))
            count = len(index) if self.images is None else min(self.images, len(index))
            filters = MaskFilters(max_area=None, min_predicted_iou=self.min_predicted_iou)
            protocol = clicks.ClickProtocol(feed_mask=self.feed_mask, boundaries=self.boundaries)
            seen = track(world.part(count), "evaluate", transient=True, disable=not world.is_main)
            also = [search.look] if self.automatic else []
            found = world.each(
                lambda: clicks.evaluate_clicks(
                    model, index, filters, protocol, seen, self.batch_size, also
                )
            )
            result, search = (
                clicks.ClickResult.joined(world.gather(found)),
                proposals.ProposalRecall.joined(world.gather(search)),
            )
            return self._told(model, index, result, search) if world.is_main else None

    def _begin(self, stack: ExitStack) -> tuple[Sam, Index, ProposalRecall]:
        """Returns the model, the data, and the search that gathers automatic masks."""
        from gigamask import config_files
        from gigamask.evaluation import proposals
        from gigamask.training.checkpoint import load_model

        search = proposals.ProposalRecall(proposals.proposals(self.points_per_side))
        return (
            load_model(self.weights, self.device, config_files.config_of_weights),
            stack.enter_context(opened(self.data)),
            search,
        )

    def _told(
        self, model: Sam, index: Index, result: ClickResult, search: ProposalRecall
    ) -> dict[str, Any]:
        """Prints and returns the scores, and writes the pages."""
        from gigamask.evaluation import clicks, figures, proposals
        from gigamask.report import scores

        summary = result.summary() | {
            "weights": self.weights,
            "data": list(self.data),
            "rejected": result.rejected,
        }
        print(clicks.table(summary))
        if self.automatic:
            summary["automatic"] = search.summary()
            print(proposals.table(summary["automatic"]))
        for reason in result.rejected:
            print(f"  left out {reason}")
        sheets = (
            figures.write_sheets(model, index, result, Path(self.pictures)) if self.pictures else []
        )
        for path in sheets:
            print(path)
        if self.html:
            Path(self.html).write_text(scores.page(summary, sheets))
            print(self.html)
        return summary
