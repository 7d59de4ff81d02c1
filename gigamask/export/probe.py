"""Fixed inputs for comparing an exported model with the original."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.sam.sam import Sam, load_sam
from gigamask.rng import make_rng
from gigamask.types import Prompts

TOLERANCE = 1e-3
"""Largest allowed difference of outputs, relative to the model's largest value; rounding is 100x
less."""
ROUNDING = 1e-6
"""Largest allowed difference of two copies of a model in the same library."""


@dataclass(frozen=True, eq=False)
class Probe:
    """An image of noise, and prompts in input pixels: points, a box, and a point with a mask.

    `valid` is the height and width of the image without padding. Without a box, a padding token
    comes last, as in Meta's and Hugging Face's code.
    """

    pixels: Float[Tensor, "1 N S S"]
    valid: Int64[Tensor, "1 2"]
    prompts: tuple[Prompts, ...]

    @classmethod
    def from_config(cls, config: SamConfig) -> "Probe":
        """Return the probe of a configuration, always the same."""
        rng, side, mask_size = make_rng(0, "probe"), config.image_size, config.mask_size
        pixels = torch.from_numpy(
            rng.integers(0, 256, (1, config.in_channels, side, side)).astype("float32")
        )
        points = torch.from_numpy(rng.uniform(0, 0.7 * side, (3, 2)).astype("float32"))
        box = torch.tensor([[0.1, 0.2], [0.6, 0.5]]) * side
        mask = torch.from_numpy(rng.normal(0, 5, (1, mask_size, mask_size)).astype("float32"))
        return cls(
            pixels,
            torch.tensor([[side * 3 // 4, side]]),
            (
                Prompts(points[None], torch.tensor([[1, 0, -1]]), None, True),
                Prompts(box[None], torch.tensor([[2, 3]]), None, True),
                Prompts(points[None, :2], torch.tensor([[1, -1]]), mask, False),
            ),
        )

    @torch.no_grad()
    def outputs(self, model: Sam) -> list[dict[str, Tensor]]:
        """Return the embedding, then low-resolution logits and predicted IoU for each prompt."""
        embedding = model.encode(self.pixels, self.valid)
        image_index = torch.zeros(1, dtype=torch.int64)
        predictions = [model.decode(embedding, image_index, prompts) for prompts in self.prompts]
        return [
            {"embedding": embedding},
            *({"logits": logits, "predicted IoU": iou} for logits, iou in predictions),
        ]


def read_back(model: Sam, out: Path) -> float:
    """Load an exported model as every command does, from what was written alone, and compare it.

    Args:
        model: The original.
        out: File or folder that was written.

    Returns:
        The largest difference of an output, relative to its largest value; 0 unless the hardware
        rounds differently from one call to the next.

    Raises:
        GigamaskError: The export cannot be loaded, or an output differs.
    """
    loaded = load_sam(out, build_custom=lambda: deepcopy(model))
    probe = Probe.from_config(model.config)
    pairs = zip(probe.outputs(model), probe.outputs(loaded), strict=True)
    return max(compare(*pair, f"{out}: gigamask", ROUNDING) for pair in pairs)


def compare(
    expected: Mapping[str, Tensor],
    actual: Mapping[str, Tensor],
    reader: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare the outputs of an exported model with those of the original.

    Args:
        expected: Outputs of the original by name.
        actual: Outputs of the exported model by name.
        reader: File and library, for the error.
        tolerance: Largest allowed difference, relative to the largest expected value.

    Returns:
        The largest difference of an output, relative to its largest expected value.

    Raises:
        GigamaskError: An output has another shape, or differs by more than `tolerance`.
    """
    worst = 0.0
    for name, tensor in expected.items():
        other = actual[name]
        if tensor.shape != other.shape:
            raise GigamaskError(
                f"{reader} returns {name} of shape {tuple(other.shape)}, the model of "
                f"{tuple(tensor.shape)}: the export is not a copy of the model"
            )
        difference = float((tensor - other).abs().max() / tensor.abs().max().clamp(min=1e-12))
        if not difference <= tolerance:
            raise GigamaskError(
                f"{reader} returns {name} that differs by {difference:.2g} of its largest value, "
                f"more than {tolerance}: the export is not a copy of the model"
            )
        worst = max(worst, difference)
    return worst
