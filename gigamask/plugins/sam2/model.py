"""The image model of SAM 2.1: SAM's interface over Hiera and SAM 2's mask decoder."""

from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor, nn

from gigamask.models.mask_decoder import ALL_MASK_TOKENS, MULTIMASK_TOKENS, SINGLE_MASK_TOKEN
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.promptable import PromptableModel
from gigamask.plugins.sam2.hiera import HieraEncoder
from gigamask.plugins.sam2.mask_decoder import Sam2MaskDecoder, with_padding_token
from gigamask.types import MaskDecoderOutput, Prompts


class Sam2(PromptableModel):
    """SAM 2.1 for images, without memory."""

    embedding_parts = ("conv_s0.", "conv_s1.", "no_mem_embed")

    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder."""
        return PromptEncoder.from_config(self.config), Sam2MaskDecoder.from_config(self.config)

    def embed(
        self,
        pixels: Float[Tensor, "B N S S"],
        input_sizes: Int64[Tensor, "B 2"],
        drop_path: Float[Tensor, "B L 2"] | None,
    ) -> Float[Tensor, "B C E E"]:
        """Return the embedding of normalized pixels, with the finer maps as channels.

        Args:
            pixels: Normalized pixels, zero in the padding.
            input_sizes: As of `encode`.
            drop_path: As of `encode`.
        """
        pyramid = cast(HieraEncoder, self.image_encoder).pyramid(pixels, drop_path)
        return self.mask_decoder.join(pyramid)

    def predict(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return masks, predicted IoU, logits of classes and object scores.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        tokens = MULTIMASK_TOKENS if prompts.multimask_output else SINGLE_MASK_TOKEN
        return self._predict(embedding, mask_image, prompts, tokens)

    def predict_all(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `predict` returns for all four masks.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        return self._predict(embedding, mask_image, prompts, ALL_MASK_TOKENS)

    def _predict(
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
        tokens: range,
    ) -> MaskDecoderOutput:
        """Return what the mask decoder predicts for a range of mask tokens."""
        prompts = with_padding_token(prompts)
        return self.mask_decoder.predict(
            embedding, mask_image, prompts, self.prompt_encoder, tokens
        )
