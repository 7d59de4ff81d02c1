"""The reference predictor's transform: images, points and boxes enter, and leave where the long side is the model's.

Its conventions (Segment Anything, `utils/transforms.py`) differ in two points from those of training here (`geometry.frame`). Pixels are resized by
Pillow, of which torch's resize, which training uses, is a level off here and there. Coordinates are scaled by the ratio of the sides, and the
prompt encoder adds half an input pixel to that: at scale k a point lies (1 - k) / 2 input pixels right of and below the place where
`ImageTransform.points_to_input` puts it, which keeps centres of pixels on the same spot of the picture.

Not here: the size that an image gets, which is `ImageTransform.whole`'s, and the way back (`geometry.frame`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional

from gigamask.masks.transforms import ImageTransform


@dataclass(frozen=True)
class ResizeLongestSide:
    """Takes images, points and boxes to where the long side has `target_length` pixels, by the reference code's conventions."""

    target_length: int

    def frame(self, original_size: tuple[int, int]) -> ImageTransform:
        """Returns how an image of that size (H, W) lies in the square."""
        return ImageTransform.whole(
            (int(original_size[0]), int(original_size[1])), self.target_length
        )

    def apply_image(self, image: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "h w 3"]:
        """Returns the image resized by Pillow's bilinear filter, antialiased, in uint8."""
        height, width = self.frame(image.shape[:2]).resized
        return np.array(
            Image.fromarray(np.ascontiguousarray(image)).resize(
                (width, height), Image.Resampling.BILINEAR
            )
        )

    def apply_image_torch(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C h w"]:
        """Returns images resized by torch, antialiased; not to the last level what `apply_image` gives."""
        return functional.interpolate(
            image,
            self.frame((image.shape[-2], image.shape[-1])).resized,
            mode="bilinear",
            antialias=True,
        )

    def apply_coords(
        self,
        coords: Float[np.ndarray, "... 2"] | Int[np.ndarray, "... 2"],
        original_size: tuple[int, int],
    ) -> Float[np.ndarray, "... 2"]:
        """Returns points `xy` of an image of that size (H, W) in the input, in float64."""
        return coords.astype(np.float64) * self._scale(original_size)

    def apply_boxes(
        self,
        boxes: Float[np.ndarray, "*n 4"] | Int[np.ndarray, "*n 4"],
        original_size: tuple[int, int],
    ) -> Float[np.ndarray, "m 4"]:
        """Returns boxes `xyxy` in the input; one box alone becomes an array of one."""
        return self.apply_coords(boxes.reshape(-1, 2, 2), original_size).reshape(-1, 4)

    def apply_coords_torch(
        self, coords: Float[Tensor, "... 2"] | Int[Tensor, "... 2"], original_size: tuple[int, int]
    ) -> Float32[Tensor, "... 2"]:
        """Returns points `xy` in the input, on their device, in float32."""
        return coords.float() * torch.tensor(
            self._scale(original_size), dtype=torch.float32, device=coords.device
        )

    def apply_boxes_torch(
        self, boxes: Float[Tensor, "*n 4"] | Int[Tensor, "*n 4"], original_size: tuple[int, int]
    ) -> Float32[Tensor, "m 4"]:
        """Returns boxes `xyxy` in the input, on their device, in float32."""
        return self.apply_coords_torch(boxes.reshape(-1, 2, 2), original_size).reshape(-1, 4)

    def _scale(self, original_size: tuple[int, int]) -> Float[np.ndarray, "2"]:
        (height, width), (h, w) = original_size, self.frame(original_size).resized
        return np.array([w / width, h / height])
