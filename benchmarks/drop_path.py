"""What drop path leaves to compute, to the slowest of many processes, by `--drop-path-mode`.

`python -m benchmarks.count_step` prints it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from benchmarks.count_step import LaunchCounter, StepCount, count_step, time_cells, time_titles
from gigamask.models.sam.image_encoder import EncoderBlock
from gigamask.rng import make_rng
from gigamask.training.sam_config import SamTrainConfig

MODES = ("sample", "balanced", "batch")
DRAWS = 100
"""Steps that are drawn for the slowest process."""


@dataclass
class DropPathCount:
    """What drop path leaves of a step.

    Attributes:
        whole: Counts of a step that skips nothing.
        mean: Counts of a step, averaged over draws.
        rates: Rate of each block and branch.
        kinds: Which of `branches` each block's two branches are.
        branches: Counts of each kind of branch.
    """

    whole: StepCount
    mean: StepCount
    rates: np.ndarray
    kinds: np.ndarray
    branches: list[StepCount]

    @classmethod
    def of(cls, run: SamTrainConfig, masks: int) -> "DropPathCount":
        """Counts a step with all branches, and without one of each kind that may be skipped."""
        blocks = cast(Sequence[EncoderBlock], run.build("meta").encoder_blocks)
        rates = np.array([[block.drop_rate] * 2 for block in blocks])
        windows = [block.window_size for block in blocks]
        names = [[("attention", window), ("MLP", 0)] for window in windows]
        examples = {
            name: (index, branch)
            for index, pair in enumerate(names)
            for branch, name in enumerate(pair)
            if rates[index, branch]
        }

        def count(skipped: tuple[int, int] | None = None) -> StepCount:
            return count_step(run, masks, LaunchCounter(run.model.mask_size), skipped)

        whole = mean = count()
        branches = [whole.plus(count(each), -1) for each in examples.values()]
        order = list(examples)
        kinds = np.array(
            [[order.index(name) if name in order else 0 for name in pair] for pair in names]
        )
        for kind, branch in enumerate(branches):
            mean = mean.plus(branch, -rates[kinds == kind].sum())
        return cls(whole, mean, rates, kinds, branches)

    def slowest(self, run: SamTrainConfig, mode: str, ranks: int) -> StepCount:
        """Returns the counts of the process that computes most of a step, one image each.

        They are means over steps; with `batch`, all processes compute the same.

        Args:
            run: The configuration.
            mode: `drop_path_mode`.
            ranks: Number of processes.
        """
        if mode == "batch" or not self.branches:
            return self.mean
        spec = replace(run.random_spec, drop_path_mode=mode)
        work = np.array([branch.count().flops for branch in self.branches])
        skipped = np.zeros(len(self.branches))
        for number in range(DRAWS):
            drawn = np.concatenate(
                [
                    spec.draw_drop_path(make_rng(0, "benchmark drop path", number, rank))
                    for rank in range(ranks)
                ]
            )
            counts = np.stack(
                [
                    ((drawn < self.rates) & (self.kinds == kind)).sum((1, 2))
                    for kind in range(len(work))
                ]
            )
            skipped += counts[:, (work @ counts).argmin()] / DRAWS
        found = self.whole
        for branch, number in zip(self.branches, skipped, strict=True):
            found = found.plus(branch, -number)
        return found


def print_drop_path(
    run: SamTrainConfig, found: DropPathCount, ranks: int, chosen: Sequence[str]
) -> None:
    """Prints what each mode of drop path leaves to the slowest process."""
    encoder = ("forward", "backward")
    slowest = {mode: found.slowest(run, mode, ranks) for mode in MODES[:2]}
    rows = {"no branch skipped": found.whole}
    rows |= {f"`{mode}`, slowest of {ranks}": counts for mode, counts in slowest.items()}
    rows["`batch`, all processes, mean of steps"] = found.mean
    print(f"\n| drop path | encoder's FLOPs | step's TFLOP | {time_titles(chosen)} |")
    print(f"|{'---|' * (3 + 2 * len(chosen))}")
    for name, counts in rows.items():
        share = counts.count(encoder).flops / found.whole.count(encoder).flops
        count = counts.count()
        cells = time_cells(count, chosen)
        print(f"| {name} | {share:.3f} | {count.flops / 1e12:.2f} | {cells} |")
