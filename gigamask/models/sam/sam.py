"""Segment Anything, as Meta has published it.

The state dict has Meta's names and shapes.
"""

from torch import nn

from gigamask import plugin
from gigamask.errors import GigamaskError
from gigamask.models.mask_decoder import (
    ALL_MASK_TOKENS,
    MULTIMASK_TOKENS,
    SINGLE_MASK_TOKEN,
    MaskDecoder,
)
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.promptable import PromptableModel
from gigamask.types import ImageEmbedding, MaskDecoderOutput, PerMask, Prompts


class Sam(PromptableModel):
    """Segment Anything model."""

    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder.

        Raises:
            GigamaskError: The configuration has a decoder of another class of models.
        """
        if (kind := self.config.model) != plugin.reference(Sam):
            raise GigamaskError(f"Sam lacks the decoder of {kind}; use config.build()")
        return PromptEncoder.from_config(self.config), MaskDecoder.from_config(self.config)

    def predict(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `decode` returns and logits of classes.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        tokens = MULTIMASK_TOKENS if prompts.multimask_output else SINGLE_MASK_TOKEN
        return self.mask_decoder.predict(
            embedding, mask_image, prompts, self.prompt_encoder, tokens
        )

    def predict_all(
        self, embedding: ImageEmbedding, mask_image: PerMask, prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `predict` returns for all four masks.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """
        encoder = self.prompt_encoder
        return self.mask_decoder.predict(embedding, mask_image, prompts, encoder, ALL_MASK_TOKENS)
