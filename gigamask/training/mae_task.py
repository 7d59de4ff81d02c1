"""What a step computes for masked pre-training: guess the hidden patches of each image, which counts as one; masks have no part in it.

Not here: the model (`model.mae`), the loss (`losses.reconstruction`), backward and update (`train.step`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gigamask.distributed.fsdp import pass_through
from gigamask.distributed.precision import Precision, autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.interfaces import Task
from gigamask.losses.mae import mae_loss, patchify
from gigamask.models.mae import MAE, MAEOutput
from gigamask.types import Batch, LossSums


@dataclass(frozen=True)
class MAETask(Task):
    """Masked pre-training: one term for a batch, over the images of which something hidden is scored."""

    precision: Precision = "fp32"

    def compute_losses(
        self, model: MAE, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        images, config = batch.images, model.config
        if not len(images):
            blank, size = (
                images.new_zeros(1, 3, config.image_size, config.image_size),
                batch.input_sizes.new_full((1, 2), config.image_size),
            )
            pass_through(
                model,
                lambda: (
                    self._guess(
                        model, blank, size, torch.zeros(1, config.patches, device=images.device)
                    ).patches
                ),
            )
            return
        guess = self._guess(model, images, batch.input_sizes, batch.random_inputs.patches)
        target = patchify(guess.pixels, config.patch_size)
        by_image = mae_loss(guess.patches, target, guess.scored, config.normalize_pixels)
        yield LossSums(
            loss=(by_image * batch.weights).sum(),
            count=guess.scored.any(1).sum().to(by_image.dtype),
            parts={"mse": by_image.detach().sum()},
            per_mask=by_image.detach(),
            first=0,
            image=torch.arange(len(images), device=images.device),
        )

    def _guess(
        self, model: MAE, images: Tensor, input_sizes: Tensor, uniforms: Tensor
    ) -> MAEOutput:
        with profile_range("forward"), autocast(self.precision, images.device):
            return model(images, input_sizes, uniforms)
