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

from gigamask.distributed.fsdp import pass_through
from gigamask.distributed.precision import Precision
from gigamask.distributed.precision import autocast as casting
from gigamask.distributed.profile_ranges import profile_generator, profile_range
from gigamask.errors import GigamaskError
from gigamask.interfaces import Loss, Mining, PromptSchedule, Task
from gigamask.models.sam.decoding import PromptDecoder
from gigamask.models.sam.sam import Sam
from gigamask.prompts.rounds import run_rounds
from gigamask.types import Batch, LossSums, RandomInputs, Targets


@dataclass(frozen=True)
class SamTask(Task):
    """Promptable segmentation: every round of every mask is one term of the loss.

    The logits handed from round to round are cut from the graph, so rounds meet only at the image embedding, and the sum over rounds
    can be back-propagated round by round (the paper does not say whether gradients flow through the mask prompt). With `full`, loss and clicks
    live on the grid that the batch's masks are on, and the logits are enlarged to it; else on the model's low-resolution one.
    """

    schedule: PromptSchedule
    loss: Loss
    masks_per_chunk: int
    precision: Precision = "fp32"
    full: bool = False
    mining: Mining | None = None  # pyrefly: ignore[bad-override] (a field, where other tasks have none)

    def compute_losses(
        self, model: Sam, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        if not len(batch.mask_image):
            side = model.config.image_size
            blank, size = (
                batch.images.new_zeros(1, 3, side, side),
                batch.input_sizes.new_full((1, 2), side),
            )
            pass_through(model, lambda: self._encode(model, blank, size, None))
            return
        encoded = self._encode(
            model, batch.images, batch.input_sizes, batch.random_inputs.drop_path
        )
        embedding = detach(
            encoded.to(torch.promote_types(encoded.dtype, torch.float32))
        )  # eleven rounds of gradients meet here
        yield from profile_generator("rounds", self._rounds(model, batch, embedding))

    def _rounds(
        self, model: Sam, batch: Batch, embedding: Float[Tensor, "B C E E"]
    ) -> Iterator[LossSums]:
        """Yields the terms of one round after the other, a few masks at a time."""
        masks = len(batch.mask_image)
        for start in range(0, masks, self.masks_per_chunk):
            part = slice(start, min(start + self.masks_per_chunk, masks))
            image, (targets, random_inputs) = (
                batch.mask_image[part],
                self.make_targets(batch, part, model.config.mask_size),
            )
            decode, weights = (
                make_decoder(model, embedding, image, self.precision, targets.masks.shape[-1]),
                batch.weights[image],
            )
            for played in run_rounds(
                decode, targets, self.schedule, random_inputs, batch.mask_only_round_u
            ):
                terms = self.loss(played, targets)
                yield replace(
                    terms,
                    loss=(terms.per_mask * weights).sum(),
                    per_mask=terms.per_mask.detach(),
                    first=start,
                    image=image,
                )

    def _encode(
        self, model: Sam, images: Tensor, input_sizes: Tensor, drop_path: Tensor | None
    ) -> Float[Tensor, "B C E E"]:
        """Returns the embedding; what is frozen computes no gradient, and is not thinned either."""
        learns = any(parameter.requires_grad for parameter in model.image_encoder.parameters())
        with (
            profile_range("encode"),
            casting(self.precision, images.device),
            torch.set_grad_enabled(learns and torch.is_grad_enabled()),
        ):
            return model.encode(images, input_sizes, drop_path if learns else None)

    def make_targets(
        self, batch: Batch, part: slice, mask_prompt_size: int
    ) -> tuple[Targets, RandomInputs]:
        """Returns what some masks of a batch are held against, and the numbers that their rounds spend."""
        targets, random_inputs = (
            targets_from_batch(batch, part, mask_prompt_size, self.full),
            select_random_inputs(batch.random_inputs, part),
        )
        return (
            replace(targets, shift=random_inputs.clicks[:, self.schedule.num_uniforms])
            if self.loss.num_uniforms
            else targets
        ), random_inputs


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


def targets_from_batch(
    batch: Batch, part: slice, mask_prompt_size: int, full: bool = False
) -> Targets:
    """Returns some masks of a batch on the low-resolution grid, area-averaged where the batch holds them on a finer one, or in `full` as they are."""
    dense = batch.dense(part.start, part.stop)
    side, grid = batch.images.shape[-1], batch.mask_size if full else mask_prompt_size
    masks = dense if batch.mask_size == grid else _average(dense, grid)
    centres = (torch.arange(grid, device=dense.device) + 0.5) * (side / grid)
    heights, widths = batch.input_sizes[batch.mask_image[part]].unbind(1)
    valid = (centres[None, :, None] < heights[:, None, None]) & (
        centres[None, None, :] < widths[:, None, None]
    )
    return Targets(
        masks,
        valid,
        batch.boxes_input[part],
        (side / grid, side / grid),
        mask_prompt_size=mask_prompt_size,
    )


def _average(dense: Tensor, grid: int) -> Float[Tensor, "m G G"]:
    if dense.shape[-1] % grid:
        raise GigamaskError(
            f"masks on a grid of {dense.shape[-1]} cannot be averaged to {grid}: it must divide; set loader.target to hard"
        )
    return functional.avg_pool2d(dense[:, None].float(), dense.shape[-1] // grid)[:, 0]


def select_random_inputs(random_inputs: RandomInputs, part: slice) -> RandomInputs:
    """Returns the numbers that belong to some masks of a batch."""
    return replace(
        random_inputs,
        first=random_inputs.first[part],
        clicks=random_inputs.clicks[part],
        box_noise=random_inputs.box_noise[part],
    )
