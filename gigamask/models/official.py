"""How programs written for Meta's `Sam` call a promptable model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from gigamask.errors import GigamaskError
from gigamask.models.configs import SamConfig
from gigamask.models.prompt_encoder import make_prompts
from gigamask.types import Prompts


class OfficialInterface(nn.Module, ABC):
    """The attributes and methods of Meta's `Sam`."""

    config: SamConfig
    pixel_mean: Tensor
    pixel_std: Tensor
    mask_threshold: float = 0.0
    """logits above it are foreground"""
    image_format: str = "RGB"
    """order of the channels"""

    @abstractmethod
    def encode(
        self, images: UInt8[Tensor, "B N S S"], input_sizes: Int64[Tensor, "B 2"]
    ) -> Float[Tensor, "B C E E"]:
        """Return the image embedding.

        Args:
            images: Channels in 0..255.
            input_sizes: Height and width of each image without padding, at the top left.
        """

    @abstractmethod
    def decode(
        self, embedding: Float[Tensor, "B C E E"], mask_image: Int64[Tensor, "M"], prompts: Prompts
    ) -> tuple[Float[Tensor, "M K G G"], Float[Tensor, "M K"]]:
        """Return mask logits and predicted IoU of M prompts.

        Args:
            embedding: Embeddings of B images.
            mask_image: Index of each prompt's image.
            prompts: The prompts.
        """

    def forward(
        self, batched_input: Sequence[dict[str, Any]], multimask_output: bool
    ) -> list[dict[str, Tensor]]:
        """Predict masks for several images, like `forward` of Meta's `Sam`.

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
            GigamaskError: An image is larger than the model's input, or prompts are invalid.
        """
        side, mask_size, device = self.config.image_size, self.config.mask_size, self.device
        images = [record["image"] for record in batched_input]
        if any(max(image.shape[1:]) > side for image in images):
            raise GigamaskError(f"images must be resized to a long side of at most {side} pixels")
        sizes = torch.tensor([image.shape[1:] for image in images], device=device)
        squares = [
            pad(image, (0, side - image.shape[2], 0, side - image.shape[1])) for image in images
        ]
        embeddings = self.encode(torch.stack(squares).to(device), sizes)
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
            logits = self.postprocess_masks(
                low_res_logits, image.shape[1:], record["original_size"]
            )
            outputs.append(
                {
                    "masks": logits > self.mask_threshold,
                    "iou_predictions": iou_predictions,
                    "low_res_logits": low_res_logits,
                }
            )
        return outputs

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.pixel_mean.device

    def preprocess(self, x: Float[Tensor, "... h w"] | UInt8[Tensor, "... h w"]) -> Tensor:
        """Return normalized pixels with zeros below and to the right, as Meta's `Sam` does.

        Args:
            x: One image `(3, h, w)` or several, in 0..255, resized to the model's long side.
        """
        side = self.config.image_size
        height, width = x.shape[-2:]
        normal = (x - self.pixel_mean) / self.pixel_std
        return pad(normal, (0, side - width, 0, side - height))

    def postprocess_masks(
        self,
        masks: Float[Tensor, "B K G G"],
        input_size: Sequence[int],
        original_size: Sequence[int],
    ) -> Float[Tensor, "B K H W"]:
        """Return logits at the image's size, without padding, as Meta's `Sam` does.

        Args:
            masks: Low-resolution logits.
            input_size: Height and width of the resized image without padding.
            original_size: Height and width of the image, (H, W).
        """
        side, (height, width) = self.config.image_size, input_size
        square = interpolate(masks, (side, side), mode="bilinear", align_corners=False)
        shown = square[..., :height, :width]
        return interpolate(shown, tuple(original_size), mode="bilinear", align_corners=False)
