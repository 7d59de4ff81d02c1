"""SAM's mask decoder: mask logits and predicted IoU from image and prompt embeddings.

Follows `modeling/mask_decoder.py` of Segment Anything. The 2 x 2 transposed convolutions do not
overlap, so they are computed as matrix products over tokens; pixels are reordered once, in the K
logits.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.layers import (
    MLP,
    LayerNorm2d,
    embedding,
    layer_norm,
    make_class_head,
    orthonormal,
    working_dtype,
)
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.shared_tensors import shared
from gigamask.models.transformer import DensePrompt, TwoWayTransformer, gather
from gigamask.types import MaskDecoderOutput, PerMask, Prompts

MULTIMASK_TOKENS, SINGLE_MASK_TOKEN, ALL_MASK_TOKENS = range(1, 4), range(1), range(4)
"""Mask tokens for three masks, for a single mask, and for all four, as in Meta's export."""


RANDOM_SCALE, SIMILARITY_SCALE, PRIOR_LOGIT = 0.7, 0.5, -2.3
"""Custom initialization: scale of the remaining random initialization, scale of similarities, and
logit of an average pixel (a probability of 9 %)."""
GELU_BIAS, RELU_BIAS = 1.0, 2.0
"""Biases that shift GELU and ReLU to where they are nearly linear."""


class MaskDecoder(nn.Module):
    """SAM's mask decoder: `forward` as Meta's class has it, and `decode`, which trains.

    `decode` takes many masks of many images in one call.
    """

    def __init__(
        self,
        *,
        transformer_dim: int,
        transformer: TwoWayTransformer,
        num_multimask_outputs: int = 3,
        activation: type[nn.Module] = nn.GELU,
        iou_head_depth: int = 3,
        iou_head_hidden_dim: int = 256,
        class_names: Sequence[str] = (),
    ) -> None:
        """Build the decoder; the arguments are those of Meta's class, and the names of classes.

        Args:
            transformer_dim: Channels of a token.
            transformer: The transformer.
            num_multimask_outputs: Masks of a prompt besides the single one.
            activation: Activation of the upscaling.
            iou_head_depth: Layers of the head of the predicted IoU, 3.
            iou_head_hidden_dim: Its hidden width.
            class_names: Names of the classes of masks.

        Raises:
            GigamaskError: The head does not have three layers.
        """
        super().__init__()
        if iou_head_depth != 3:
            raise GigamaskError(f"the head of the IoU has 3 layers (got {iou_head_depth})")
        self.transformer_dim, self.num_multimask_outputs = transformer_dim, num_multimask_outputs
        self.num_mask_tokens, dim = num_multimask_outputs + 1, transformer_dim
        self.transformer = transformer
        self.iou_token = embedding(1, dim)
        self.mask_tokens = embedding(self.num_mask_tokens, dim)
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(dim, dim // 4, 2, stride=2),
            LayerNorm2d(dim // 4),
            activation(),
            nn.ConvTranspose2d(dim // 4, dim // 8, 2, stride=2),
            activation(),
        )
        self.output_hypernetworks_mlps = nn.ModuleList(
            MLP(dim, dim, dim // 8) for _ in range(self.num_mask_tokens)
        )
        self.iou_prediction_head = MLP(dim, iou_head_hidden_dim, self.num_mask_tokens)
        self.class_head = make_class_head(dim, iou_head_hidden_dim, class_names)

    @classmethod
    def from_config(cls, config: SamConfig) -> "MaskDecoder":
        """Return the mask decoder of a configuration."""
        return cls(
            transformer_dim=config.embedding_dim,
            transformer=TwoWayTransformer.from_config(config),
            iou_head_hidden_dim=config.iou_hidden,
            class_names=config.class_names,
        )

    def forward(
        self,
        image_embeddings: Float[Tensor, "B C H W"],
        image_pe: Float[Tensor, "1 C H W"],
        sparse_prompt_embeddings: Float[Tensor, "P T C"],
        dense_prompt_embeddings: Float[Tensor, "P C H W"],
        multimask_output: bool,
    ) -> tuple[Float[Tensor, "M K h w"], Float[Tensor, "M K"]]:
        """Return low-resolution logits and predicted IoU of prompts, as Meta's class does.

        Args:
            image_embeddings: Embedding of the image, or of each prompt's image.
            image_pe: The prompt encoder's `get_dense_pe`.
            sparse_prompt_embeddings: Tokens from the prompt encoder.
            dense_prompt_embeddings: Dense embeddings from the prompt encoder.
            multimask_output: Whether to return the three masks instead of the single one.
        """
        masks, iou = self.predict_masks(
            image_embeddings, image_pe, sparse_prompt_embeddings, dense_prompt_embeddings
        )
        chosen = slice(1, None) if multimask_output else slice(1)
        return masks[:, chosen], iou[:, chosen]

    def predict_masks(
        self,
        image_embeddings: Float[Tensor, "B C H W"],
        image_pe: Float[Tensor, "1 C H W"],
        sparse_prompt_embeddings: Float[Tensor, "P T C"],
        dense_prompt_embeddings: Float[Tensor, "P C H W"],
    ) -> tuple[Float[Tensor, "M K h w"], Float[Tensor, "M K"]]:
        """Return what `forward` does for all four masks.

        Args:
            image_embeddings: As of `forward`.
            image_pe: As of `forward`.
            sparse_prompt_embeddings: As of `forward`.
            dense_prompt_embeddings: As of `forward`.

        Raises:
            GigamaskError: There are several images and another number of prompts.
        """
        images, prompts = len(image_embeddings), len(sparse_prompt_embeddings)
        if images > 1 < prompts != images:
            raise GigamaskError(
                f"image_embeddings must be those of one image, or one for each of {prompts} "
                f"prompts (got {images}); call the mask decoder for each image"
            )
        count = prompts if images == 1 else images
        index = torch.arange(count, device=image_embeddings.device) % images
        tokens, dense = (
            each.expand(count, *each.shape[1:])
            for each in (sparse_prompt_embeddings, dense_prompt_embeddings)
        )
        features = dense.flatten(2).transpose(1, 2)
        unit = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        output = self.decode(
            image_embeddings,
            image_pe[0].permute(1, 2, 0),
            tokens,
            index,
            DensePrompt(torch.zeros_like(unit[0]), features, unit),
            range(self.num_mask_tokens),
        )
        return cast(Tensor, output.masks), output.iou_predictions

    def predict(
        self,
        embedding: Float[Tensor, "B D H W"],
        mask_image: PerMask,
        prompts: Prompts,
        prompt_encoder: PromptEncoder,
        mask_tokens: range,
    ) -> MaskDecoderOutput:
        """Return what `decode` does for prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image.
            prompts: M prompts.
            prompt_encoder: Their encoder.
            mask_tokens: Range of K of the four mask tokens to use.
        """
        return self.decode(
            embedding,
            prompt_encoder.token_positions(),
            prompt_encoder.points(prompts.points_xy_input, prompts.labels),
            mask_image,
            prompt_encoder.dense(prompts.masks, prompts.has_mask_prompt),
            mask_tokens,
            prompts.token_mask,
        )

    def decode(
        self,
        images: Float[Tensor, "B C H W"],
        positions: Float[Tensor, "H W C"],
        prompts: Float[Tensor, "M N C"],
        mask_image: PerMask,
        dense: DensePrompt,
        mask_tokens: range,
        token_mask: Bool[Tensor, "M N"] | None = None,
    ) -> MaskDecoderOutput:
        """Return mask logits, predicted IoU, and logits of classes if the model has them.

        Only the heads of the requested mask tokens are computed.

        Args:
            images: Embeddings of B images.
            positions: Position encoding of the image tokens.
            prompts: Tokens of M prompts.
            mask_image: Index of each prompt's image.
            dense: What is added to the image tokens.
            mask_tokens: Range of K of the four mask tokens to use.
            token_mask: Which prompt tokens to attend to; None means all.
        """
        flat, *_ = shared(self, "image tokens", lambda: (image_tokens(images),))
        tokens, image = self._attend(flat, positions, prompts, mask_image, dense, token_mask)
        heads, iou, classes = self._heads(tokens, mask_tokens)
        return MaskDecoderOutput(self.upscaled(image, heads, positions), iou, classes)

    @torch.no_grad()
    def custom_init(self, seed: int) -> None:
        """Initialize attention to the prompts' positions, and masks by similarity.

        Mask logits start as the similarity between the mask token and each image token. Both are
        projected by the same orthonormal rows, and the bias is a background prior. The activations
        of the upscaling and the hypernetworks are shifted to where they are nearly linear.

        Args:
            seed: Random seed of the run.
        """
        self.transformer.init_tied_cross_attention(seed)
        dim = self.iou_token.embedding_dim
        first = orthonormal(dim // 4, dim, seed, "match first")
        second = orthonormal(dim // 8, dim // 4, seed, "match second")
        upscale, norm, last = (cast(Any, self.output_upscaling[index]) for index in (0, 1, 3))
        upscale.weight.mul_(RANDOM_SCALE).add_(first.T[:, :, None, None])
        last.weight.mul_(RANDOM_SCALE).add_(second.T[:, :, None, None])
        norm.bias.fill_(GELU_BIAS)
        last.bias.fill_(GELU_BIAS)
        average = F.gelu(F.gelu(norm.bias) @ last.weight.mean((2, 3)) + last.bias)
        for head in cast(Iterable[MLP], self.output_hypernetworks_mlps):
            inner, middle, outer = cast(Iterable[nn.Linear], head.layers)
            inner.weight.mul_(RANDOM_SCALE).add_(torch.eye(dim))
            middle.weight.mul_(RANDOM_SCALE).add_(torch.eye(dim))
            inner.bias.fill_(RELU_BIAS)
            outer.weight.mul_(RANDOM_SCALE).add_(SIMILARITY_SCALE * second @ first)
            # A zero token and an average pixel then give the prior.
            at_zero = head(torch.zeros(dim)) - outer.bias
            outer.bias.copy_(PRIOR_LOGIT * average / average.square().sum() - at_zero)

    def _attend(
        self,
        images: Float[Tensor, "B T C"],
        positions: Float[Tensor, "H W C"],
        prompts: Float[Tensor, "M N C"],
        mask_image: PerMask,
        dense: DensePrompt,
        token_mask: Bool[Tensor, "M N"] | None,
    ) -> tuple[Float[Tensor, "M N2 C"], Float[Tensor, "M T C"]]:
        """Return the decoder's own and the prompts' tokens, and the image tokens."""
        own, *_ = shared(self, "own tokens", lambda: (self._own_tokens(),))
        tokens = torch.cat([own.expand(prompts.shape[0], -1, -1), prompts], 1)
        attention_mask = (
            None if token_mask is None else F.pad(token_mask, (len(own), 0), value=True)
        )
        return self.transformer.attend(
            images,
            positions.flatten(0, 1),
            tokens,
            mask_image,
            dense,
            attention_mask,
            same_images=True,
        )

    def _own_tokens(self) -> Float[Tensor, "N C"]:
        """Return the decoder's own tokens."""
        return torch.cat([self.iou_token.weight, self.mask_tokens.weight])

    def _heads(
        self, tokens: Float[Tensor, "M N C"], mask_tokens: range
    ) -> tuple[Float[Tensor, "M c K"], Float[Tensor, "M K"], Float[Tensor, "M K n"] | None]:
        """Return the hypernetworks' outputs, predicted IoU, and logits of classes."""
        heads = torch.stack(
            [self.output_hypernetworks_mlps[index](tokens[:, 1 + index]) for index in mask_tokens],
            -1,
        )
        iou = self.iou_prediction_head(tokens[:, 0])[:, mask_tokens.start : mask_tokens.stop]
        if self.class_head is None:
            return heads, iou, None
        return heads, iou, self.class_head(tokens[:, 1 + mask_tokens.start : 1 + mask_tokens.stop])

    def upscaled(
        self,
        image: Float[Tensor, "M T C"],
        heads: Float[Tensor, "M c K"],
        positions: Float[Tensor, "H W C"],
        finer: tuple[Float[Tensor, "B T 4 d"], Float[Tensor, "B P c"], PerMask] | None = None,
    ) -> Float[Tensor, "M K h w"]:
        """Return the product of each head with the image tokens, upscaled by a factor of four.

        Args:
            image: Image tokens of each mask.
            heads: Outputs of the hypernetworks.
            positions: Position encoding of the image tokens, of which only the grid is used.
            finer: SAM 2's features at two and four times the embedding's resolution, which are
                added there, and the index of each mask's image.
        """
        first, second = (upscaling_weights(self.output_upscaling, index) for index in (0, 3))
        _, norm, activation, _, last_activation = cast(Iterable[Any], self.output_upscaling)

        twice = F.linear(image, *first).unflatten(-1, (4, -1))
        if finer is not None:
            twice = twice + gather(finer[0], finer[2]).to(twice.dtype)
        four = F.linear(activation(layer_norm(twice, norm)), *second)
        four = four.unflatten(-1, (4, -1)).flatten(1, 3)
        if finer is not None:
            four = four + gather(finer[1], finer[2]).to(four.dtype)
        logits = last_activation(four) @ heads.to(four.dtype)
        height, width = positions.shape[:2]
        pixels = logits.view(image.shape[0], height, width, 2, 2, 2, 2, heads.shape[-1])
        return pixels.permute(0, 7, 1, 3, 5, 2, 4, 6).reshape(
            image.shape[0], heads.shape[-1], 4 * height, 4 * width
        )


def image_tokens(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T C"]:
    """Return the tokens of embeddings, in the dtype of the transformer's matrix products."""
    return images.flatten(2).transpose(1, 2).contiguous().to(working_dtype(images))


def upscaling_weights(
    upscaling: nn.Sequential, index: int
) -> tuple[Float[Tensor, "D C"], Float[Tensor, "D"]]:
    """Return weight and bias of a 2 x 2 transposed convolution of stride 2 as a linear layer.

    Its D outputs hold the four pixels, row by row.

    Args:
        upscaling: The decoder's `output_upscaling`.
        index: Position of the convolution.
    """
    layer = cast(nn.ConvTranspose2d, upscaling[index])
    weight, bias = shared(
        upscaling,
        f"upscaling {index}",
        lambda: (
            layer.weight.permute(2, 3, 1, 0).flatten(0, 2),
            cast(Tensor, layer.bias).repeat(4),
        ),
    )
    return weight, bias
