"""Decoding of prompts for embedded images, in training, evaluation and inference alike."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.models.promptable import PromptableModel
from gigamask.types import MaskDecoderOutput, Prediction, Prompts, map_tensors


@dataclass(frozen=True, eq=False)
class PromptDecoder:
    """Decoder of prompts for embedded images.

    Args:
        model: The model whose prompt encoder and mask decoder are used.
        embedding: Embeddings of the images.
        image_index: Index of each prompt's image; None if there is only one image.
        resize: Resizes low-resolution logits to the desired size; None keeps them.
        autocast: Returns the context in which the model runs; resizing happens outside of it.
        best_only: Whether to keep only the mask with the highest predicted IoU.
    """

    model: PromptableModel
    embedding: Float[Tensor, "B C E E"]
    image_index: Int64[Tensor, "M"] | None = None
    resize: Callable[[Tensor], Tensor] | None = None
    autocast: Callable[[], AbstractContextManager] = nullcontext
    best_only: bool = False

    def __call__(self, prompts: Prompts) -> Prediction:
        """Return logits at the desired size, predicted IoU and low-resolution logits per prompt."""
        output = self.output(prompts)
        with self.autocast():
            low = self.model.on_grid(output)
        logits = low if self.resize is None else self.resize(low)
        return Prediction(logits, output.iou_predictions, low, output.windows, output.class_logits)

    def output(self, prompts: Prompts) -> MaskDecoderOutput:
        """Return what the model predicts; masks in windows are not pasted."""
        prompts = map_tensors(lambda each: each.to(self.embedding.device), prompts)
        index = self.image_index
        if index is None:
            count = len(prompts.labels)
            index = torch.zeros(count, dtype=torch.int64, device=self.embedding.device)
        with self.autocast():
            if self.model.answers_in_windows or self.model.config.class_names:
                output = self.model.predict(self.embedding, index, prompts)
            else:  # a subclass may override `decode` alone
                output = MaskDecoderOutput(*self.model.decode(self.embedding, index, prompts))
        if self.best_only:
            output = output.select(output.iou_predictions.argmax(1))
        return output


def refined(
    decode: Callable[[Prompts], Prediction], prompts: Prompts, prediction: Prediction
) -> Prediction:
    """Return each mask, or the single mask for its prompt and itself if that promises a higher IoU.

    Args:
        decode: Predicts masks from prompts.
        prompts: What the masks were predicted for.
        prediction: The masks.
    """
    low = prediction.low_res_logits
    rows = torch.arange(len(low), device=prompts.labels.device).repeat_interleave(low.shape[1])
    each = replace(prompts.select(rows), masks=low.flatten(0, 1), multimask_output=False)
    return prediction.better(decode(each).regrouped(low.shape[1]))
