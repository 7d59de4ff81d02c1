"""The loss of a training step of a masked autoencoder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gigamask.distributed.fsdp import dummy_forward
from gigamask.distributed.precision import Precision, autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.interfaces import Task
from gigamask.losses.mae import mae_loss, patchify
from gigamask.models.configs import MAEConfig
from gigamask.models.mae import MAE, MAEOutput
from gigamask.types import Batch, LossSums


@dataclass(frozen=True)
class MAETask(Task):
    """Masked autoencoding: reconstruct the hidden patches; the loss counts images, not masks."""

    precision: Precision = "fp32"

    def compute_losses(
        self, model: MAE, batch: Batch, detach: Callable[[Tensor], Tensor]
    ) -> Iterator[LossSums]:
        """Yield the loss of all images, as one term.

        Args:
            model: The model.
            batch: The micro-batch; without images, a sharded model runs on a dummy image.
            detach: Detaches the reconstruction.
        """
        images, config = batch.images, model.config
        if not len(images):
            image = images.new_zeros(1, 3, config.image_size, config.image_size)
            size = batch.input_sizes.new_full((1, 2), config.image_size)
            uniforms = torch.zeros(1, config.patches, device=images.device)
            dummy_forward(model, lambda: self._forward(model, image, size, uniforms).patches)
            return
        output = self._forward(model, images, batch.input_sizes, batch.random_inputs.patches)
        target, normalize = self.target(output, batch, config)
        per_image = mae_loss(detach(output.patches), target, output.scored, normalize)
        yield LossSums(
            loss=(per_image * batch.weights).sum(),
            count=output.scored.any(1).sum().to(per_image.dtype),
            parts={"mse": per_image.detach().sum()},
            per_mask=per_image.detach(),
            first=0,
            image=torch.arange(len(images), device=images.device),
        )

    def target(
        self, output: MAEOutput, batch: Batch, config: MAEConfig
    ) -> tuple[Float[Tensor, "B P D"], bool]:
        """Return what each patch is compared with, and whether it is normalized first.

        Args:
            output: Output of the model.
            batch: The micro-batch.
            config: Configuration of the model.
        """
        return patchify(output.pixels, config.patch_size), config.normalize_pixels

    def _forward(
        self, model: MAE, images: Tensor, input_sizes: Tensor, uniforms: Tensor
    ) -> MAEOutput:
        with profile_range("forward"), autocast(self.precision, images.device):
            return model(images, input_sizes, uniforms)
