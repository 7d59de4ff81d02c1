"""FLOPs of a training step: the trainer's own passes on the meta device, with torch's counter.

Matrix products and convolutions are counted as the code performs them: attention by its definition,
without the channels that a GPU's kernel pads. Recomputation of blocks is counted separately.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class StepFlops:
    """Forward and backward FLOPs of one image: of the encoder, and of its masks in all rounds.

    `blocks` are the forward FLOPs of the encoder's blocks. Without rounds, everything is `encoder`.
    """

    encoder: tuple[float, float]
    masks: tuple[float, float]
    blocks: tuple[float, ...]
    rounds: int

    @property
    def total(self) -> float:
        """FLOPs of forward and backward pass together."""
        return sum(self.encoder) + sum(self.masks)

    @property
    def forward(self) -> float:
        """FLOPs of the forward pass alone."""
        return self.encoder[0] + self.masks[0]

    def recomputed(self, every: int) -> float:
        """Return the FLOPs of recomputing every `every`-th block; 0 disables recomputation."""
        return sum(self.blocks[::every], 0.0) if every else 0.0


class FlopMeter:
    """Count the FLOPs of one image's forward and backward pass, by phase."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._marks: list[tuple[str, int]] = []
        self._blocks: list[int] = []

    def enter(self, phase: str) -> None:
        """Record that a phase begins or continues."""
        self._marks.append((phase, self._counter.get_total_flops()))

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Count the forward passes of these blocks separately."""
        for index, block in enumerate(blocks):
            self._blocks.append(0)
            block.forward = partial(self._forward, index, block.forward)

    def _forward(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._counter.get_total_flops()
        result = forward(*args, **kwargs)
        self._blocks[index] += self._counter.get_total_flops() - before
        return result

    def measure(
        self, run: Callable[[], None], rounds: Callable[[], int], chunks: float
    ) -> StepFlops:
        """Count the FLOPs of one image.

        Args:
            run: Computes the gradients of one chunk of masks, in the first two rounds and the last.
            rounds: Returns the number of rounds of the whole schedule, after `run`.
            chunks: Number of equal chunks that the image's masks are split into.

        Returns:
            The FLOPs of the image with all its masks in all rounds.
        """
        with self._counter:
            run()
        total, encoded = self._counter.get_total_flops(), self._marks[0][1]
        # Marks are set before the first round, and before and after each round's backward pass.
        marks = [flops for phase, flops in self._marks if phase == "rounds"]
        forward = [after - start for start, after in zip(marks[:-1:2], marks[1::2], strict=True)]
        both = [after - start for start, after in pairwise(marks[::2])]
        count = rounds()
        masks_forward, masks_both = (chunks * _all_rounds(each, count) for each in (forward, both))
        return StepFlops(
            (float(encoded), float(total - encoded - sum(both))),
            (masks_forward, masks_both - masks_forward),
            tuple(map(float, self._blocks)),
            count,
        )


def _all_rounds(measured: Sequence[int], rounds: int) -> float:
    """Extrapolate to all rounds: each one in between costs the mean of the second and the last."""
    later = sum(measured[1:]) / max(len(measured) - 1, 1)
    return float(sum(measured[:1]) + (rounds - 1) * later)
