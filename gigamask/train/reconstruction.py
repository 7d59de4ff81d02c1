"""What a step computes for masked pre-training: guess the hidden patches of each image, which counts as one; masks have no part in it.

Not here: the model (`model.mae`), the loss (`losses.reconstruction`), backward and update (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gigamask.contracts import Batch, Terms
from gigamask.losses.reconstruction import patches_of, reconstruction
from gigamask.model.mae import Guess, Mae
from gigamask.parallel.precision import Precision, casting
from gigamask.parallel.ranges import marked
from gigamask.parallel.shard import pass_through
from gigamask.seams import Task


@dataclass(frozen=True)
class MaeTask(Task):
    """Masked pre-training: one term for a batch, over the images of which something hidden is scored."""

    precision: Precision = "fp32"

    def terms(self, model: Mae, batch: Batch, cut: Callable[[Tensor], Tensor]) -> Iterator[Terms]:
        images, spec = batch.images, model.spec
        if not len(images):
            blank, size = images.new_zeros(1, 3, spec.input_side, spec.input_side), batch.input_sizes.new_full((1, 2), spec.input_side)
            pass_through(model, lambda: self._guess(model, blank, size, torch.zeros(1, spec.patches, device=images.device)).patches)
            return
        guess = self._guess(model, images, batch.input_sizes, batch.draws.patches)
        truth = patches_of(guess.pixels, spec.patch)
        by_image = reconstruction(guess.patches, truth, guess.scored, spec.normalise_pixels)
        yield Terms(
            loss=(by_image * batch.weights).sum(),
            count=guess.scored.any(1).sum().to(by_image.dtype),
            parts={"mse": by_image.detach().sum()},
            by_mask=by_image.detach(),
            first=0,
            image=torch.arange(len(images), device=images.device),
        )

    def _guess(self, model: Mae, images: Tensor, input_sizes: Tensor, uniforms: Tensor) -> Guess:
        with marked("forward"), casting(self.precision, images.device):
            return model(images, input_sizes, uniforms)
