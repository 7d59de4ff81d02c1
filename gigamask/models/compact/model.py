"""The model of `compact`: SAM's interface over an encoder and a decoder of its own."""

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from gigamask.masks.devices import is_readable
from gigamask.models.compact.decoder import SAMPLES, TOKENS, WindowMaskDecoder
from gigamask.models.compact.prompt_maps import MIDDLE_WINDOW, PromptShapes, widened
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.promptable import PromptableModel
from gigamask.types import MaskDecoderOutput, Prompts, WindowLogits


class CompactSam(PromptableModel):
    """A SAM that answers in windows around the prompts."""

    answers_in_windows = True

    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder."""
        config = self.config
        parts = cast(ConvPyramid, config.encoder), cast(WindowDecoder, config.decoder)
        window = PromptEncoder(config.embedding_dim, (TOKENS, TOKENS), (SAMPLES, SAMPLES))
        return window, WindowMaskDecoder(config, *parts)

    def predict(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return masks in windows, predicted IoU and logits of classes.

        Without `multimask_output`, a mask prompt is answered in the middle window, and other
        prompts in that of three with the highest predicted IoU; in training, a box, too, is
        answered in the middle window, which takes a third of the time. Outside of training, a
        correction is then answered once more, in a closer window around its last click.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        all_windows = prompts.multimask_output or not self._is_certain(prompts)
        output: MaskDecoderOutput = self.mask_decoder(
            embedding, mask_image, prompts, self.prompt_encoder, all_windows
        )
        if prompts.multimask_output:
            return output
        if all_windows:
            output = output.select(self._single(output, prompts))
        return output if self.training else self._closer(output, embedding, mask_image, prompts)

    def predict_all(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return the single mask and the masks of the three windows on the G x G grid.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """
        output = self.predict(embedding, mask_image, prompts)
        single = output.select(self._single(output, prompts))
        single = self._closer(single, embedding, mask_image, prompts)
        masks = torch.cat([self.on_grid(single), self.on_grid(output)], 1)
        rest = [
            torch.cat([one, three], 1)
            for one, three in zip(single[1:], output[1:], strict=True)
            if one is not None and three is not None
        ]
        return MaskDecoderOutput(masks, *rest)

    def _closer(
        self,
        output: MaskDecoderOutput,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
    ) -> MaskDecoderOutput:
        """Return the single masks, those of corrections answered again around the last click."""
        if (masks := prompts.masks) is None:
            return output
        embedding, prompts = widened(embedding, prompts)
        shapes = PromptShapes.from_prompts(prompts)
        if is_readable(masks) and not shapes.corrects.any():
            return output
        window = shapes.closer_window(masks, self.config.image_size)
        low = self.on_grid(output)
        again = replace(prompts, masks=low[:, 0])
        answer: MaskDecoderOutput = self.mask_decoder(
            embedding, mask_image, again, self.prompt_encoder, False, closer=window
        )
        windows = cast(WindowLogits, answer.masks)
        ones = answer._replace(masks=replace(windows, logits=torch.ones_like(windows.logits)))
        shown = (self.on_grid(ones) > 0) & shapes.corrects[:, None, None, None]
        return output._replace(masks=torch.where(shown, self.on_grid(answer), low))

    def _is_certain(self, prompts: Prompts) -> bool:
        """Return whether the middle window surely answers all prompts, which a GPU is not asked."""
        if prompts.masks is not None and prompts.has_mask_prompt is None:
            return True
        return self.training and is_readable(prompts.labels) and bool(prompts.has_box.all())

    def _single(self, output: MaskDecoderOutput, prompts: Prompts) -> Int64[Tensor, "M"]:
        """Return which of the three windows has the single mask of each prompt."""
        index = output.iou_predictions.argmax(1)
        if self.training:
            index = torch.where(prompts.has_box, MIDDLE_WINDOW, index)
        if prompts.has_mask_prompt is not None:
            index = torch.where(prompts.has_mask_prompt, MIDDLE_WINDOW, index)
        return index
