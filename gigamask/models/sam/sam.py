"""Segment Anything, as Meta has published it.

The state dict has Meta's names and shapes.
"""

from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor, nn

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
from gigamask.models.transformer import DensePrompt
from gigamask.types import MaskDecoderOutput, Prompts


class Sam(PromptableModel):
    """Segment Anything model."""

    def build_decoder(self) -> tuple[PromptEncoder, nn.Module]:
        """Return a new prompt encoder and mask decoder.

        Raises:
            GigamaskError: The configuration has a decoder of another class of models.
        """
        if (kind := self.config.model) != plugin.reference(Sam):
            raise GigamaskError(f"Sam lacks the decoder of {kind}; use config.build()")
        return PromptEncoder(self.config), MaskDecoder(self.config)

    def predict(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `decode` returns and logits of classes.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts.
        """
        mask_tokens = MULTIMASK_TOKENS if prompts.multimask_output else SINGLE_MASK_TOKEN
        dense = self.prompt_encoder.dense(prompts.masks, prompts.has_mask_prompt)
        return self._predict(embedding, mask_image, prompts, dense, mask_tokens)

    def predict_all(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> MaskDecoderOutput:
        """Return what `predict` returns for all four masks.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image, ascending.
            prompts: The prompts, with masks and `has_mask_prompt`.
        """
        masks = cast(Tensor, prompts.masks), cast(Tensor, prompts.has_mask_prompt)
        dense = self.prompt_encoder.mixed_prompt(*masks)
        return self._predict(embedding, mask_image, prompts, dense, ALL_MASK_TOKENS)

    def _predict(
        self,
        embedding: Float[Tensor, "B C E E"],
        mask_image: Int64[Tensor, "M"],
        prompts: Prompts,
        dense: DensePrompt,
        mask_tokens: range,
    ) -> MaskDecoderOutput:
        """Return what the mask decoder predicts from the points of prompts and a dense prompt."""
        encoder = self.prompt_encoder
        return self.mask_decoder(
            embedding,
            encoder.get_dense_pe(),
            encoder.points(prompts.points_xy_input, prompts.labels),
            mask_image,
            dense,
            mask_tokens,
            prompts.token_mask,
        )
