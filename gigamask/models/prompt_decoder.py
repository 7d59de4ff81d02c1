"""Decoding of prompts for embedded images, in training, evaluation and inference alike."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.models.promptable import PromptableModel
from gigamask.types import MaskDecoderOutput, Prediction, Prompts


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
        prompts = prompts.to(self.embedding.device)
        index = self.image_index
        if index is None:
            index = prompts.labels.new_zeros(len(prompts.labels))
        with self.autocast():
            if self.model.answers_in_windows or self.model.config.class_names:
                output = self.model.predict(self.embedding, index, prompts)
            else:  # a subclass may override `decode` alone
                output = MaskDecoderOutput(*self.model.decode(self.embedding, index, prompts))
        if self.best_only:
            output = output.select(output.iou_predictions.argmax(1))
        return output


def refined(
    decode: Callable[[Prompts], Prediction],
    prompts: Prompts,
    prediction: Prediction,
    times: int = 1,
) -> Prediction:
    """Return masks that were decoded again, each with its prompt and itself as a mask prompt.

    For a box, the answer with the higher predicted IoU is kept. For clicks alone it is the mean of
    both, with the predicted IoU of the first, which chooses among masks better. A mask that was
    answered in a window is then averaged with answers in four closer windows. The low-resolution
    logits of clicks alone stay the first, from which further clicks go on better.

    Args:
        decode: Predicts masks from prompts.
        prompts: What the masks were predicted for.
        prediction: The masks.
        times: How often masks are passed back; 0 returns the prediction.
    """
    if not times:
        return prediction
    count, found = prediction.logits.shape[1], prediction
    prompts = prompts.to(prediction.logits.device)
    rows = torch.arange(len(prompts.labels), device=prompts.labels.device)
    each = replace(prompts.select(rows.repeat_interleave(count)), multimask_output=False)

    def again(closer: bool) -> Prediction:
        masks = found.low_res_logits.flatten(0, 1)
        return decode(replace(each, masks=masks, closer=closer)).regrouped(count)

    for _ in range(times):
        found = found.better(again(False), averaged=~prompts.has_box)
    if prediction.in_window is not None:
        nearer = again(True)
        found = replace(found, logits=nearer.logits, low_res_logits=nearer.low_res_logits)
    low = torch.where(
        prompts.has_box[:, None, None, None], found.low_res_logits, prediction.low_res_logits
    )
    return replace(found, low_res_logits=low)
