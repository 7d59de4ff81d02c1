"""SAM with options of its mask decoder, `SamDecoder`."""

from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor, nn

from gigamask.models.configs import SamConfig, SamDecoder
from gigamask.models.sam.dense_decoder import DenseMaskDecoder, prompt_frame
from gigamask.models.sam.mask_decoder import ALL_MASK_TOKENS, MULTIMASK_TOKENS, SINGLE_MASK_TOKEN
from gigamask.models.sam.prompt_encoder import PromptEncoder
from gigamask.models.sam.sam import Sam
from gigamask.types import MaskDecoderOutput, Prompts


class DenseSam(Sam):
    """A SAM whose prompts enter densely, too; with `windows`, it answers in windows."""

    def __init__(self, config: SamConfig) -> None:
        super().__init__(config)
        self.answers_in_windows = cast(SamDecoder, config.decoder).windows

    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder."""
        return PromptEncoder(prompt_frame(self.config)), DenseMaskDecoder(self.config)

    def predict(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return masks, predicted IoU and logits of classes; masks in windows are not pasted.

        Without `multimask_output`, it answers in the middle window.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        tokens = MULTIMASK_TOKENS if prompts.multimask_output else SINGLE_MASK_TOKEN
        output = self.mask_decoder(embedding, mask_image, prompts, self.prompt_encoder, tokens)
        return output if self.answers_in_windows else output._replace(masks=output.masks.logits)

    def predict_all(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `predict` returns for all four masks, on the G x G grid.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """
        encoder = self.prompt_encoder
        output = self.mask_decoder(embedding, mask_image, prompts, encoder, ALL_MASK_TOKENS)
        low = output.masks.logits
        if self.answers_in_windows:
            low = output.masks.paste(self.config.mask_size, self.config.image_size)
        return output._replace(masks=low)
