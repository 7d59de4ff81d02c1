"""What a step multiplies: the trainer's own passes run on the meta device under torch's counter; products leave, in FLOPs.

Counted are matrix products and convolutions, as the code makes them: attention by its definition, without the channels that a GPU's form pads.
What recomputed blocks do twice is told apart.

Not here: what a chip does in a second (`memory.gpus`), the phases of a step (`memory.rehearsal`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Products:
    """FLOPs of an image, forward and backward: of the encoder (of everything where there are no rounds), and of so many `rounds` on its masks.
    `blocks` are the forward passes of the encoder's blocks."""

    encoder: tuple[float, float]
    masks: tuple[float, float]
    blocks: tuple[float, ...]
    rounds: int

    @property
    def total(self) -> float:
        """Forward and backward together."""
        return sum(self.encoder) + sum(self.masks)

    @property
    def forward(self) -> float:
        """Forward alone."""
        return self.encoder[0] + self.masks[0]

    def again(self, every: int) -> float:
        """Returns what is computed twice when every `every`-th block is recomputed; 0 is off."""
        return sum(self.blocks[::every], 0.0) if every else 0.0


class Meter:
    """Counts products while the gradients of an image are computed, and notes how many there were whenever a phase begins or goes on."""

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._moments: list[tuple[str, int]] = []
        self._blocks: list[int] = []

    def mark(self, phase: str) -> None:
        """Notes that a phase begins, or goes on."""
        self._moments.append((phase, self._counter.get_total_flops()))

    def watch(self, blocks: Iterable[nn.Module]) -> None:
        """Counts the forward passes of these blocks apart."""
        for index, block in enumerate(blocks):
            self._blocks.append(0)
            block.forward = partial(self._forward, index, block.forward)

    def _forward(self, index: int, forward: Callable[..., Any], *arguments: Any) -> Any:
        before = self._counter.get_total_flops()
        answer = forward(*arguments)
        self._blocks[index] += self._counter.get_total_flops() - before
        return answer

    def products(self, act: Callable[[], None], rounds: Callable[[], int], share: float) -> Products:
        """Returns what `act` multiplies, which plays the first two rounds and the last one, of as many as `rounds` then says, on one of `share` equal
        parts of the image's masks.
        """
        with self._counter:
            act()
        played = rounds()
        total, encoded = self._counter.get_total_flops(), self._moments[0][1]
        # Marks stand before the first round, and before and after each one's backward pass.
        ends = [flops for phase, flops in self._moments if phase == "rounds"]
        there = [after - before for before, after in zip(ends[:-1:2], ends[1::2], strict=True)]
        whole = [after - before for before, after in pairwise(ends[::2])]
        forward, both = (share * _all(each, played) for each in (there, whole))
        return Products((float(encoded), float(total - encoded - sum(whole))), (forward, both - forward), tuple(map(float, self._blocks)), played)


def _all(played: Sequence[int], rounds: int) -> float:
    """Returns the sum over all rounds: those between the second and the last cost what these two do in the mean."""
    return float(sum(played[:1]) + (rounds - 1) * sum(played[1:]) / max(len(played) - 1, 1))
