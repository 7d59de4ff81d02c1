"""SAMI: a masked autoencoder that predicts a SAM's embedding (Xiong et al. 2023).

The paper is arXiv 2312.00863; no code was published. Not stated there, and ours: an image is
enlarged to the teacher's input, and the teacher's embedding is averaged over each patch.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from gigamask.distributed.precision import autocast
from gigamask.distributed.profile_ranges import profile_range
from gigamask.models.configs import MAEConfig
from gigamask.models.mae import MAEOutput
from gigamask.models.promptable import PromptableModel
from gigamask.training.mae_task import MAETask
from gigamask.types import Batch


@dataclass(frozen=True)
class SAMITask(MAETask):
    """Predict the teacher's embedding at every patch from the visible ones; counts images.

    Args:
        teacher: The frozen teacher.
    """

    teacher: PromptableModel = field(kw_only=True)

    def __post_init__(self) -> None:
        self.teacher.eval().requires_grad_(False)

    @property
    def frozen_models(self) -> tuple[nn.Module, ...]:
        """The teacher."""
        return (self.teacher,)

    def target(
        self, output: MAEOutput, batch: Batch, config: MAEConfig
    ) -> tuple[Float[Tensor, "B P D"], bool]:
        """Return the teacher's features of each patch, which are not normalized.

        Args:
            output: Output of the model.
            batch: The micro-batch.
            config: Configuration of the model.
        """
        with profile_range("teacher"), autocast(self.precision, batch.images.device):
            features = patch_features(
                self.teacher, batch.images, batch.input_sizes, config.embedding_size
            )
        return features[..., : config.feature_channels], False


@torch.no_grad()
def patch_features(
    teacher: PromptableModel,
    images: UInt8[Tensor, "B N S S"],
    input_sizes: Int64[Tensor, "B 2"],
    side: int,
) -> Float[Tensor, "B P D"]:
    """Return a teacher's embedding, averaged over each patch of smaller images.

    Args:
        teacher: The teacher; its input is at least as large as the images.
        images: RGB in 0..255.
        input_sizes: Height and width of each image without padding.
        side: Number of patches along a side, no more than of the teacher's tokens.
    """
    own, given = teacher.config.image_size, images.shape[-1]
    if own != given:
        images = functional.interpolate(images.float(), (own, own), mode="bilinear")
        input_sizes = (input_sizes * own + given // 2) // given
    embedding = teacher.encode(images, input_sizes)
    averaged = functional.adaptive_avg_pool2d(embedding, side)
    return averaged.flatten(2).transpose(1, 2)
