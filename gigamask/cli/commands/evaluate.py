"""`gigamask evaluate`: score weights on annotated images."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gigamask import files
from gigamask.errors import GigamaskError
from gigamask.launch import PartOptions
from gigamask.parser import Positional
from gigamask.progress import progress_bar
from gigamask.workflows.evaluate import EvaluateOptions

if TYPE_CHECKING:
    from gigamask.workflows.evaluate import Evaluated


@dataclass(frozen=True)
class EvaluateCommand(EvaluateOptions, PartOptions):
    """score weights on annotated images: mean IoU by clicks and by box, calibration, boundaries"""

    weights: Annotated[str, Positional("WEIGHTS")]
    """a run folder, a checkpoint, a .pth, a .safetensors, a Hugging Face folder or id, or starter,
    the small model in this package"""
    data: tuple[str, ...]
    """tars, folders of tars, globs, an index, or tables of images; or one path with --images or
    --masks"""
    pictures: str | None = None
    """folder for figures of the best, worst and typical predictions"""
    html: str | None = None
    """HTML file for the scores, with the figures of --pictures"""
    table: str | None = None
    """CSV file for the scores of each mask"""
    json: str | None = None
    """JSON file for the scores"""

    def check(self) -> None:
        """Raise `GigamaskError` if a value is invalid."""
        super().check()
        if self.part:
            self.check_parts()

    def check_parts(self) -> None:
        """Raise `GigamaskError` if the masks of an image cannot be scored in parts."""
        if self.automatic:
            raise GigamaskError(
                "--automatic keeps all predicted masks, so it cannot run in parts; share the "
                "images by torchrun"
            )

    def run(self) -> dict[str, Any] | None:
        """Evaluate; print and return the scores on the main process."""
        from gigamask.data.worker_pool import part_of
        from gigamask.models.weight_paths import check_order, check_weights_exist
        from gigamask.parser import check_writable
        from gigamask.workflows.own_data import check_data

        check_writable("--html", self.html)
        check_writable("--table", self.table)
        written = [os.path.realpath(path) for path in (self.html, self.table, self.json) if path]
        if len(set(written)) < len(written):
            raise GigamaskError(
                f"--html {self.html}, --table {self.table}, --json {self.json}: give each a file "
                "of its own"
            )
        if self.pictures:
            files.check_out(self.pictures, "pictures", lambda entry: True)
        part = part_of(self.part)
        # Of several processes, only one states what is wrong.
        if os.environ.get("WORLD_SIZE", "1") == "1":
            self.check()
            check_order(self.weights, self.data[0], "gigamask evaluate {} --data {}")
            check_weights_exist(self.weights)
            check_data(self.data, self)
        with progress_bar("load torch"):
            from gigamask.distributed.precision import choose_device
            from gigamask.distributed.world import destroy_world, init_world
            from gigamask.workflows.evaluate import score

        world = init_world(os.environ, choose_device(self.device))
        try:
            with ExitStack() as stack:
                evaluated = score(self.weights, self.data, self, world, stack, part)
                return None if evaluated is None else self._report(evaluated)
        finally:
            destroy_world(world)

    def _report(self, evaluated: Evaluated) -> dict[str, Any]:
        """Print the scores, and write the pictures and the HTML file."""
        from gigamask.distributed.precision import autocast
        from gigamask.evaluation import clicks, figures, proposals
        from gigamask.report import scores

        model, index, result = evaluated.model, evaluated.index, evaluated.result
        if self.table:  # before what may fail, such as pictures, or a pipe that is closed
            files.write_text(self.table, result.csv())
        print(clicks.table(evaluated.summary))
        if self.automatic:
            print(proposals.table(evaluated.summary["automatic"]))
        for reason in result.skipped:
            print(f"  skipped {reason}")
        paths = []
        if self.pictures:
            with progress_bar("draw"), autocast(evaluated.summary["precision"], model.device):
                paths = figures.write_figures(model, index, result, Path(self.pictures))
        for path in paths:
            print(path)
        if self.table:
            print(self.table)
        if self.html:
            files.write_text(self.html, scores.page(evaluated.summary, paths))
            print(self.html)
        return evaluated.summary
