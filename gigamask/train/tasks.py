"""What a step computes for SAM: encode the images once, then play the interactive rounds on a few masks at a time.

Not here: the rounds (`prompts.rounds`), the loss (`losses.objective`), backward and update (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.contracts import Batch, Draws, Prediction, Prompts, Terms, Truth
from gigamask.faults import Fault
from gigamask.model.sam import Sam
from gigamask.parallel.precision import casting
from gigamask.prompts.rounds import play
from gigamask.seams import Objective, Policy, Task


@dataclass(frozen=True)
class SamTask(Task):
    """Promptable segmentation: every round of every mask is one term of the loss.

    The logits handed from round to round are cut from the graph, so rounds meet only at the image embedding, and the sum over rounds
    can be back-propagated round by round (the paper does not say whether gradients flow through the mask prompt).
    """

    policy: Policy
    objective: Objective
    masks_at_once: int
    precision: Literal["fp32", "bf16"] = "fp32"

    def terms(self, model: Sam, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        device = batch.images.device
        masks = len(batch.mask_image)
        if not masks:
            return
        with casting(self.precision, device):
            encoded = model.encode(batch.images, batch.input_sizes, batch.draws.drop_path)
        embedding = cut(encoded if encoded.dtype != torch.bfloat16 else encoded.float())  # eleven rounds of gradients meet here
        for start in range(0, masks, self.masks_at_once):
            part = slice(start, min(start + self.masks_at_once, masks))
            truth = truth_of(batch, part, model.spec.grid)
            decode = decoder(model, embedding, batch.mask_image[part], self.precision)
            weights = batch.weights[batch.mask_image[part]]
            for played in play(decode, truth, self.policy, draws_of(batch.draws, part), batch.pause):
                terms = self.objective(played, truth)
                yield replace(terms, loss=(terms.by_mask * weights).sum(), by_mask=terms.by_mask.detach(), first=start)


def decoder(
    model: Sam, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "m"], precision: Literal["fp32", "bf16"]
) -> Callable[[Prompts], Prediction]:
    """Returns the function that answers prompts about some masks of embedded images, on the model's own low-resolution grid."""

    def decode(prompts: Prompts) -> Prediction:
        with casting(precision, embedding.device):
            low, iou = model.decode(embedding, mask_image, prompts)
        return Prediction(low, iou, low)

    return decode


def truth_of(batch: Batch, part: slice, grid: int) -> Truth:
    """Returns some masks of a batch on the `grid` x `grid` truth grid, area-averaged where the batch holds them on a finer one."""
    dense = batch.dense(part.start, part.stop)
    side = batch.images.shape[-1]
    masks = dense if batch.grid == grid else _average(dense, grid)
    centres = (torch.arange(grid, device=dense.device) + 0.5) * (side / grid)
    heights, widths = batch.input_sizes[batch.mask_image[part]].unbind(1)
    valid = (centres[None, :, None] < heights[:, None, None]) & (centres[None, None, :] < widths[:, None, None])
    return Truth(masks, valid, batch.boxes_input[part], (side / grid, side / grid))


def _average(dense: Tensor, grid: int) -> Float[Tensor, "m G G"]:
    if dense.shape[-1] % grid:
        raise Fault(f"masks on a grid of {dense.shape[-1]} cannot be averaged to {grid}: it must divide; set loading.target to hard")
    return functional.avg_pool2d(dense[:, None].float(), dense.shape[-1] // grid)[:, 0]


def draws_of(draws: Draws, part: slice) -> Draws:
    """Returns the numbers that belong to some masks of a batch."""
    return Draws(draws.first[part], draws.clicks[part], draws.box_noise[part], draws.drop_path)
