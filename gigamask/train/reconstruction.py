"""What a step computes for masked pre-training: guess the hidden patches of each image, which counts as one; masks have no part in it.

Not here: the model (`model.mae`), the loss (`losses.reconstruction`), backward and update (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gigamask.contracts import Batch, Terms
from gigamask.losses.reconstruction import patches_of, reconstruction
from gigamask.model.mae import Mae
from gigamask.parallel.precision import casting
from gigamask.parallel.ranges import marked
from gigamask.seams import Task


@dataclass(frozen=True)
class MaeTask(Task):
    """Masked pre-training: one term for a batch, over the images of which something hidden is scored."""

    precision: Literal["fp32", "bf16"] = "fp32"

    def terms(self, model: Mae, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        images = batch.images
        if not len(images):
            return
        with marked("forward"), casting(self.precision, images.device):
            guess = model(images, batch.input_sizes, batch.draws.patches)
        truth = patches_of(guess.pixels, model.spec.patch)
        by_image = reconstruction(guess.patches, truth, guess.scored, model.spec.normalise_pixels)
        yield Terms(
            loss=(by_image * batch.weights).sum(),
            count=guess.scored.any(1).sum().to(by_image.dtype),
            parts={"mse": by_image.detach().sum()},
            by_mask=by_image.detach(),
            first=0,
            image=torch.arange(len(images), device=images.device),
        )
