"""What a step computes for SAM: encode the images once, then play the interactive rounds on a few masks at a time.

Not here: the rounds (`prompts.rounds`), the loss (`losses.objective`), backward and update (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from gigamask.contracts import Batch, Draws, Terms, Truth
from gigamask.faults import Fault
from gigamask.model.decoding import PromptDecoder
from gigamask.model.sam import Sam
from gigamask.parallel.precision import Precision, casting
from gigamask.parallel.ranges import making, marked
from gigamask.parallel.shard import pass_through
from gigamask.prompts.rounds import play
from gigamask.seams import Mining, Objective, Policy, Task


@dataclass(frozen=True)
class SamTask(Task):
    """Promptable segmentation: every round of every mask is one term of the loss.

    The logits handed from round to round are cut from the graph, so rounds meet only at the image embedding, and the sum over rounds
    can be back-propagated round by round (the paper does not say whether gradients flow through the mask prompt). With `full`, loss and clicks
    live on the grid that the batch's masks are on, and the logits are enlarged to it; else on the model's low-resolution one.
    """

    policy: Policy
    objective: Objective
    masks_per_chunk: int
    precision: Precision = "fp32"
    full: bool = False
    mining: Mining | None = None  # pyrefly: ignore[bad-override] (a field, where other tasks have none)

    def terms(self, model: Sam, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        if not len(batch.mask_image):
            side = model.spec.input_side
            blank, size = batch.images.new_zeros(1, 3, side, side), batch.input_sizes.new_full((1, 2), side)
            pass_through(model, lambda: self._encode(model, blank, size, None))
            return
        encoded = self._encode(model, batch.images, batch.input_sizes, batch.draws.drop_path)
        embedding = cut(encoded.to(torch.promote_types(encoded.dtype, torch.float32)))  # eleven rounds of gradients meet here
        yield from making("rounds", self._rounds(model, batch, embedding))

    def _rounds(self, model: Sam, batch: Batch, embedding: Float[Tensor, "B C E E"]) -> Iterator[Terms]:
        """Yields the terms of one round after the other, a few masks at a time."""
        masks = len(batch.mask_image)
        for start in range(0, masks, self.masks_per_chunk):
            part = slice(start, min(start + self.masks_per_chunk, masks))
            image, (truth, draws) = batch.mask_image[part], self.pose(batch, part, model.spec.grid)
            decode, weights = make_decoder(model, embedding, image, self.precision, truth.masks.shape[-1]), batch.weights[image]
            for played in play(decode, truth, self.policy, draws, batch.pause):
                terms = self.objective(played, truth)
                yield replace(terms, loss=(terms.by_mask * weights).sum(), by_mask=terms.by_mask.detach(), first=start, image=image)

    def _encode(self, model: Sam, images: Tensor, input_sizes: Tensor, drop_path: Tensor | None) -> Float[Tensor, "B C E E"]:
        """Returns the embedding; what is frozen computes no gradient, and is not thinned either."""
        learns = any(parameter.requires_grad for parameter in model.image_encoder.parameters())
        with marked("encode"), casting(self.precision, images.device), torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return model.encode(images, input_sizes, drop_path if learns else None)

    def pose(self, batch: Batch, part: slice, low_side: int) -> tuple[Truth, Draws]:
        """Returns what some masks of a batch are held against, and the numbers that their rounds spend."""
        truth, draws = truth_of(batch, part, low_side, self.full), draws_of(batch.draws, part)
        return (replace(truth, shift=draws.clicks[:, self.policy.draws]) if self.objective.draws else truth), draws


def make_decoder(
    model: Sam,
    embedding: Float[Tensor, "B C E E"],
    mask_image: Int64[Tensor, "m"],
    precision: Precision,
    grid: int | None = None,
) -> PromptDecoder:
    """Return the decoder of prompts about some masks of a batch.

    Args:
        model: the model that made the embedding.
        embedding: embeddings of the batch's images.
        mask_image: the image of each mask.
        precision: number format the model computes in.
        grid: side of the logits that are compared with the masks; None is the model's own.
    """
    resize = None if grid is None else partial(_resize_logits, side=grid)
    autocast = partial(casting, precision, embedding.device)
    return PromptDecoder(model, embedding, mask_image, resize, autocast)


def _resize_logits(logits: Float[Tensor, "m k g g"], side: int) -> Float[Tensor, "m k G G"]:
    if logits.shape[-1] == side:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.interpolate(wide, (side, side), mode="bilinear", align_corners=False)


def truth_of(batch: Batch, part: slice, low_side: int, full: bool = False) -> Truth:
    """Returns some masks of a batch on the low-resolution grid, area-averaged where the batch holds them on a finer one, or in `full` as they are."""
    dense = batch.dense(part.start, part.stop)
    side, grid = batch.images.shape[-1], batch.grid if full else low_side
    masks = dense if batch.grid == grid else _average(dense, grid)
    centres = (torch.arange(grid, device=dense.device) + 0.5) * (side / grid)
    heights, widths = batch.input_sizes[batch.mask_image[part]].unbind(1)
    valid = (centres[None, :, None] < heights[:, None, None]) & (centres[None, None, :] < widths[:, None, None])
    return Truth(masks, valid, batch.boxes_input[part], (side / grid, side / grid), low_side=low_side)


def _average(dense: Tensor, grid: int) -> Float[Tensor, "m G G"]:
    if dense.shape[-1] % grid:
        raise Fault(f"masks on a grid of {dense.shape[-1]} cannot be averaged to {grid}: it must divide; set loading.target to hard")
    return functional.avg_pool2d(dense[:, None].float(), dense.shape[-1] // grid)[:, 0]


def draws_of(draws: Draws, part: slice) -> Draws:
    """Returns the numbers that belong to some masks of a batch."""
    return replace(draws, first=draws.first[part], clicks=draws.clicks[part], box_noise=draws.box_noise[part])
