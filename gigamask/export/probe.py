"""What an exported model is asked before it is called done: an image of noise and a few prompts, and how near its answers must be.

Not here: the formats (`official`, `huggingface`, `onnx`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.sam.sam import Sam
from gigamask.rng import make_rng
from gigamask.types import Prompts

LIMIT = 1e-3
"""How far an answer may be from the model's, as a share of the model's largest number; roundings are a hundredth of that."""


@dataclass(frozen=True, eq=False)
class Probe:
    """An image, `valid` (height, width) of whose pixels are the picture, and prompts in input pixels: points, a box, and a point with a mask; where
    there is no box a token that is no point comes last, as Meta's code and Hugging Face's add it."""

    pixels: Float[Tensor, "1 3 S S"]
    valid: Int64[Tensor, "1 2"]
    prompts: tuple[Prompts, ...]

    @classmethod
    def of(cls, config: SamConfig) -> "Probe":
        """Returns the same for every model of a spec."""
        chance, side, grid = make_rng(0, "probe"), config.image_size, config.mask_size
        pixels = torch.from_numpy(chance.integers(0, 256, (1, 3, side, side)).astype("float32"))
        spots = torch.from_numpy(chance.uniform(0, 0.7 * side, (3, 2)).astype("float32"))
        box, mask = (
            torch.tensor([[0.1, 0.2], [0.6, 0.5]]) * side,
            torch.from_numpy(chance.normal(0, 5, (1, grid, grid)).astype("float32")),
        )
        return cls(
            pixels,
            torch.tensor([[side * 3 // 4, side]]),
            (
                Prompts(spots[None], torch.tensor([[1, 0, -1]]), None, True),
                Prompts(box[None], torch.tensor([[2, 3]]), None, True),
                Prompts(spots[None, :2], torch.tensor([[1, -1]]), mask, False),
            ),
        )

    @torch.no_grad()
    def answers(self, model: Sam) -> list[dict[str, Tensor]]:
        """Returns the model's embedding, then its low-resolution logits and predicted IoU for each prompt."""
        embedding = model.encode(self.pixels, self.valid)
        told = [
            model.decode(embedding, torch.zeros(1, dtype=torch.int64), prompts)
            for prompts in self.prompts
        ]
        return [
            {"embedding": embedding},
            *({"logits": logits, "predicted IoU": iou} for logits, iou in told),
        ]


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], reader: str) -> float:
    """Returns the largest difference of an answer as a share of ours; raises `GigamaskError` that says what differs where that is too much."""
    worst = 0.0
    for name, mine in ours.items():
        other = theirs[name]
        if mine.shape != other.shape:
            raise GigamaskError(
                f"{reader} answers with {name} of {tuple(other.shape)}, the model with {tuple(mine.shape)}; what was written is no copy of it"
            )
        apart = float((mine - other).abs().max() / mine.abs().max().clamp(min=1e-12))
        if not apart <= LIMIT:
            raise GigamaskError(
                f"{reader} answers with {name} that differs by {apart:.2g} of its largest number, {LIMIT} at most; what was written is no copy"
            )
        worst = max(worst, apart)
    return worst
