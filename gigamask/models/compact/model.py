"""The model of `compact`: SAM's interface over an encoder and a decoder of its own."""

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gigamask.masks.devices import is_readable
from gigamask.models.compact.decoder import SAMPLES, TOKENS, WindowMaskDecoder
from gigamask.models.compact.prompt_maps import MIDDLE_WINDOW, PromptShapes
from gigamask.models.configs import ConvPyramid, WindowDecoder
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.promptable import PromptableModel
from gigamask.types import ImageEmbedding, MaskDecoderOutput, PerMask, Prompts, WindowLogits


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
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return masks in windows, predicted IoU and logits of classes.

        Without `multimask_output`, a mask prompt is answered in the middle window, and other
        prompts in that of three with the highest predicted IoU; in training, a box, too, is
        answered in the middle window, which takes a third of the time. Outside of training, a
        correction is then averaged with answers in four windows that cover it, as `closer` asks.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        # Whether the middle window surely answers all prompts, which a GPU is not asked.
        is_certain = prompts.masks is not None and prompts.has_mask_prompt is None
        if self.training and is_readable(prompts.labels):
            is_certain = is_certain or bool(prompts.has_box.all())
        all_windows = prompts.multimask_output or not is_certain
        output: MaskDecoderOutput = self.mask_decoder(
            embedding, mask_image, prompts, self.prompt_encoder, all_windows
        )
        if prompts.closer:
            return self._averaged(cast(Tensor, prompts.masks), output)
        if prompts.multimask_output:
            return output
        if all_windows:
            output = output.select(self._single(output, prompts))
        return output if self.training else self._corrected(output, embedding, mask_image, prompts)

    def predict_all(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return the single mask and the masks of the three windows on the G x G grid.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """
        output = self.predict(embedding, mask_image, prompts)
        single = output.select(self._single(output, prompts))
        single = self._corrected(single, embedding, mask_image, prompts)
        masks = torch.cat([self.on_grid(single), self.on_grid(output)], 1)
        rest = [
            torch.cat([one, three], 1)
            for one, three in zip(single[1:], output[1:], strict=True)
            if one is not None and three is not None
        ]
        return MaskDecoderOutput(masks, *rest)

    def _corrected(
        self,
        output: MaskDecoderOutput,
        embedding: ImageEmbedding,
        mask_image: PerMask,
        prompts: Prompts,
    ) -> MaskDecoderOutput:
        """Return the single masks, those of corrections averaged with answers in closer windows."""
        if prompts.masks is None:
            return output
        corrects = PromptShapes.from_prompts(prompts).corrects
        if is_readable(corrects) and not corrects.any():
            return output
        low = self.on_grid(output)
        again = replace(prompts, masks=low[:, 0], multimask_output=False, closer=True)
        closer, _ = self.decode(embedding, mask_image, again)
        return output._replace(masks=torch.where(corrects[:, None, None, None], closer, low))

    def _averaged(
        self, masks: Float[Tensor, "M G G"], answer: MaskDecoderOutput
    ) -> MaskDecoderOutput:
        """Return the means of mask prompts and of the answers in closer windows."""
        windows = cast(WindowLogits, answer.masks)
        ones = replace(windows, logits=windows.logits * 0 + 1)  # ONNX would fix a shape
        shown = ones.paste(masks.shape[-1], self.config.image_size) > 0
        number = shown.sum(1)
        mean = (self.on_grid(answer) * shown).sum(1) / number.clamp(min=1)
        masks = torch.where(number > 0, (masks + mean) / 2, masks)
        return MaskDecoderOutput(masks[:, None], answer.iou_predictions.mean(1, keepdim=True))

    def _single(self, output: MaskDecoderOutput, prompts: Prompts) -> PerMask:
        """Return which of the three windows has the single mask of each prompt."""
        index = output.iou_predictions.argmax(1)
        if self.training:
            index = torch.where(prompts.has_box, MIDDLE_WINDOW, index)
        if prompts.has_mask_prompt is not None:
            index = torch.where(prompts.has_mask_prompt, MIDDLE_WINDOW, index)
        return index
