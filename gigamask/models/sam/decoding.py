"""Decode prompts about embedded images: the one path of training, evaluation and prediction."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.models.sam.sam import Sam
from gigamask.types import Prediction, Prompts


@dataclass(frozen=True, eq=False)
class PromptDecoder:
    """Answers prompts about embedded images.

    Args:
        model: the model whose prompt encoder and mask decoder are used.
        embedding: embeddings of the images.
        image_index: the image that each prompt is about; None where there is only one image.
        resize: enlarges low-resolution logits to the size of the wanted masks; None keeps them.
        autocast: makes the context in which the model runs; resizing happens outside of it.
        best_only: keep only the mask with the highest predicted IoU.
    """

    model: Sam
    embedding: Float[Tensor, "B C E E"]
    image_index: Int64[Tensor, "M"] | None = None
    resize: Callable[[Tensor], Tensor] | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    best_only: bool = False

    def __call__(self, prompts: Prompts) -> Prediction:
        """Return logits at the wanted size, predicted IoU and low-resolution logits per prompt."""
        prompts = _to_device(prompts, self.embedding.device)
        index = self.image_index
        if index is None:
            count = len(prompts.labels)
            index = torch.zeros(count, dtype=torch.int64, device=self.embedding.device)
        with self.autocast():
            low, iou = self.model.decode(self.embedding, index, prompts)
        if self.best_only:
            best = torch.arange(len(iou), device=iou.device), iou.argmax(1)
            low, iou = low[best][:, None], iou[best][:, None]
        return Prediction(low if self.resize is None else self.resize(low), iou, low)


def _to_device(prompts: Prompts, device: torch.device) -> Prompts:
    masks = prompts.masks
    return replace(
        prompts,
        points_xy_input=prompts.points_xy_input.to(device),
        labels=prompts.labels.to(device),
        masks=None if masks is None else masks.to(device),
    )
