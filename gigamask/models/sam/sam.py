"""The model: pixels become an embedding once, prompts become masks as often as asked.

Enters: uint8 images fitted to the input square with the size of their valid part, and `contracts.Prompts`. Leaves: the embedding
`(B, C, E, E)`; mask logits `(M, K, G, G)` and predicted IoU `(M, K)`. The state dict is Meta's, key by key.

Not here: how a model starts (`model.start`), rounds of prompts (`prompts.rounds`), reading and writing weights (`model.weights`),
masks at the image's own size (`geometry.frame`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.sam.mask_decoder import MULTIMASK_TOKENS, SINGLE_MASK_TOKEN, MaskDecoder
from gigamask.models.sam.prompt_encoder import PromptEncoder
from gigamask.models.sam.prompts import make_prompts
from gigamask.models.sam.transformer import DensePrompt
from gigamask.types import Prompts

PIXEL_MEAN, PIXEL_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""ImageNet's mean and standard deviation in 0..255, red first (Segment Anything, `modeling/sam.py`)."""


def preprocess(
    images: UInt8[Tensor, "B 3 S S"] | Float[Tensor, "B 3 S S"],
    input_sizes: Int64[Tensor, "B 2"],
    mean: Float[Tensor, "3 1 1"],
    std: Float[Tensor, "3 1 1"],
) -> Float[Tensor, "B 3 S S"]:
    """Returns pixels, in 0..255, less their mean over their deviation, 0 in the padding."""
    place = torch.arange(images.shape[-1], device=images.device)
    rows, columns = place < input_sizes[:, :1], place < input_sizes[:, 1:]
    return (
        (images.to(mean.dtype) - mean) / std * (rows[:, None, :, None] & columns[:, None, None, :])
    )


class Sam(nn.Module):
    """Segment Anything at any size, with the image encoder that its spec names."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: SamConfig) -> None:
        super().__init__()
        self.config = config
        self.image_encoder = config.encoder.build(config)
        self.prompt_encoder = PromptEncoder(config)
        self.mask_decoder = MaskDecoder(config)
        self.register_buffer("pixel_mean", torch.tensor(PIXEL_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(PIXEL_STD).view(3, 1, 1), persistent=False)

    @property
    def encoder_blocks(self) -> list[nn.Module]:
        """The image encoder's blocks, from input to output."""
        return list(self.config.encoder.blocks(self.image_encoder))

    def forward(
        self, batched_input: Sequence[dict[str, Any]], multimask_output: bool
    ) -> list[dict[str, Tensor]]:
        """Predict masks of several images, as the `forward` of Meta's `Sam`.

        Gradients flow, unlike in Meta's class; wrap the call in `torch.no_grad()` for inference.

        Args:
            batched_input: One dictionary per image: "image", `(3, h, w)` RGB in 0..255, already
                resized to the model's long side; "original_size", (H, W); optionally
                "point_coords" `(B, N, 2)` with "point_labels" `(B, N)`, "boxes" `(B, 4)`, both in
                pixels of the resized image, and "mask_inputs" `(B, 1, G, G)`.
            multimask_output: Whether to predict three masks per prompt instead of one.

        Returns:
            One dictionary per image: "masks" `(B, C, H, W)` bool at the original size,
            "iou_predictions" `(B, C)`, "low_res_logits" `(B, C, G, G)`.

        Raises:
            GigamaskError: An image is larger than the model's input, or prompts do not fit.
        """
        side, mask_size = self.config.image_size, self.config.mask_size
        images = [record["image"] for record in batched_input]
        if any(max(image.shape[1:]) > side for image in images):
            raise GigamaskError(f"images must be resized to a long side of at most {side} pixels")
        sizes = torch.tensor([image.shape[1:] for image in images], device=self.pixel_mean.device)
        squares = [
            pad(image, (0, side - image.shape[2], 0, side - image.shape[1])) for image in images
        ]
        embeddings = self.encode(torch.stack(squares).to(self.pixel_mean.device), sizes)
        outputs = []
        for record, image, embedding in zip(batched_input, images, embeddings, strict=True):
            prompts = make_prompts(
                record.get("point_coords"),
                record.get("point_labels"),
                record.get("boxes"),
                record.get("mask_inputs"),
                multimask_output,
                mask_size,
            )
            first = torch.zeros(len(prompts.labels), dtype=torch.int64, device=embedding.device)
            low_res_logits, iou_predictions = self.decode(embedding[None], first, prompts)
            square = interpolate(low_res_logits, (side, side), mode="bilinear", align_corners=False)
            height, width = image.shape[1:]
            logits = interpolate(
                square[..., :height, :width],
                tuple(record["original_size"]),
                mode="bilinear",
                align_corners=False,
            )
            outputs.append(
                {
                    "masks": logits > 0,
                    "iou_predictions": iou_predictions,
                    "low_res_logits": low_res_logits,
                }
            )
        return outputs

    def encode(
        self,
        images: UInt8[Tensor, "B 3 S S"] | Float[Tensor, "B 3 S S"],
        input_sizes: Int64[Tensor, "B 2"],
        drop_path: Float[Tensor, "B L 2"] | None = None,
    ) -> Float[Tensor, "B C E E"]:
        """Returns the embedding of images whose valid part, `input_sizes` (height, width), lies at the top left; the rest is zero once normalised.

        `drop_path` holds the uniforms that decide which residual branches are skipped; None in evaluation. Raises a Fault at another side.
        """
        if images.shape[-1] != self.config.image_size:
            side = images.shape[-1]
            raise GigamaskError(
                f"images have side {side}, the model takes {self.config.image_size}; build it with input_side={side} and load its weights there"
            )
        return self.image_encoder(
            preprocess(images, input_sizes, self.pixel_mean, self.pixel_std), drop_path
        )

    def decode(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> tuple[Float[Tensor, "M K G G"], Float[Tensor, "M K"]]:
        """Returns mask logits and predicted IoU of prompt m on image `mask_image[m]`; K is 3 when `prompts.several`, else 1.

        A mask that `prompts.masked` leaves out is answered as without a mask prompt, whatever stands in its place.
        """
        encoder = self.prompt_encoder
        tokens = encoder.points(prompts.points_xy_input, prompts.labels)
        if prompts.masks is None:
            dense = None
            embedding = embedding + encoder.no_mask_embed.weight.view(1, -1, 1, 1)
        elif prompts.has_mask_prompt is None:
            dense = DensePrompt(encoder.mask_features(prompts.masks), *encoder.mask_projection())
        else:
            dense = DensePrompt(*encoder.mixed_features(prompts.masks, prompts.has_mask_prompt))
        asked = MULTIMASK_TOKENS if prompts.multimask_output else SINGLE_MASK_TOKEN
        return self.mask_decoder(
            embedding, encoder.get_dense_pe(), tokens, mask_image, dense, asked, prompts.token_mask
        )
