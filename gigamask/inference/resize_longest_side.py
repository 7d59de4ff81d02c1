"""Segment Anything's `ResizeLongestSide`: scales images, points and boxes to the model's input.

SAM's `utils/transforms.py` resizes pixels with Pillow; the results of torch, which training uses
(`masks.transforms`), differ by one level in places. Coordinates are those of `ImageTransform`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, Shaped
from PIL import Image
from torch import Tensor

from gigamask.masks.transforms import ImageTransform, resize, whole_image


@dataclass(eq=False)
class ResizeLongestSide:
    """Scales images, points and boxes so that the long side has `target_length` pixels.

    With `stretch`, both sides have, as in SAM 2's `SAM2Transforms`.
    """

    target_length: int
    stretch: bool = False

    def image_transform(self, original_size: tuple[int, int]) -> ImageTransform:
        """Return the transform of an image of size (H, W) into the model's square input."""
        height, width = original_size
        size = int(height), int(width)
        return whole_image(size, self.target_length, self.stretch)

    @staticmethod
    def get_preprocess_shape(oldh: int, oldw: int, long_side_length: int) -> tuple[int, int]:
        """Return the height and width of an image whose long side is resized.

        Args:
            oldh: Height of the image.
            oldw: Width of the image.
            long_side_length: Length of its long side afterwards.
        """
        return whole_image((int(oldh), int(oldw)), int(long_side_length)).resized

    def apply_image(self, image: Shaped[np.ndarray, "H W *C"]) -> Shaped[np.ndarray, "h w *C"]:
        """Resize an image or a mask with Pillow's antialiased bilinear filter."""
        height, width = self.image_transform(image.shape[:2]).resized
        is_one = image.ndim == 2 or image.shape[2] == 3
        planes = [image] if is_one else list(np.moveaxis(image, 2, 0))
        resized = [
            np.array(
                Image.fromarray(np.ascontiguousarray(plane)).resize(
                    (width, height), Image.Resampling.BILINEAR
                )
            )
            for plane in planes
        ]
        return resized[0] if is_one else np.stack(resized, 2)

    def apply_image_torch(self, image: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C h w"]:
        """Resize images with torch, antialiased; values may differ by one from `apply_image`."""
        size = self.image_transform((image.shape[-2], image.shape[-1])).resized
        return resize(image, size)

    def apply_coords(
        self,
        coords: Float[np.ndarray, "... 2"] | Int[np.ndarray, "... 2"],
        original_size: tuple[int, int],
    ) -> Float[np.ndarray, "... 2"]:
        """Scale points to the model's input.

        Args:
            coords: x and y in pixels of the original image.
            original_size: Height and width of the original image.

        Returns:
            x and y in pixels of the input, float64.
        """
        return self.image_transform(original_size).points_to_input(coords.astype(np.float64))

    def apply_boxes(
        self,
        boxes: Float[np.ndarray, "*n 4"] | Int[np.ndarray, "*n 4"],
        original_size: tuple[int, int],
    ) -> Float[np.ndarray, "m 4"]:
        """Scale boxes to the model's input.

        Args:
            boxes: X0, y0, x1, y1 in pixels of the original image; a single box may be `(4,)`.
            original_size: Height and width of the original image.

        Returns:
            x0, y0, x1, y1 in pixels of the input, float64.
        """
        return self.apply_coords(boxes.reshape(-1, 2, 2), original_size).reshape(-1, 4)

    def apply_coords_torch(
        self, coords: Float[Tensor, "... 2"] | Int[Tensor, "... 2"], original_size: tuple[int, int]
    ) -> Float32[Tensor, "... 2"]:
        """Scale points to the model's input, on their device.

        Args:
            coords: x and y in pixels of the original image.
            original_size: Height and width of the original image.

        Returns:
            x and y in pixels of the input, float32.
        """
        scale_xy = self.image_transform(original_size).scale_xy
        return coords.float() * torch.tensor(scale_xy, dtype=torch.float32, device=coords.device)

    def apply_boxes_torch(
        self, boxes: Float[Tensor, "*n 4"] | Int[Tensor, "*n 4"], original_size: tuple[int, int]
    ) -> Float32[Tensor, "m 4"]:
        """Scale boxes to the model's input, on their device.

        Args:
            boxes: X0, y0, x1, y1 in pixels of the original image; a single box may be `(4,)`.
            original_size: Height and width of the original image.

        Returns:
            x0, y0, x1, y1 in pixels of the input, float32.
        """
        return self.apply_coords_torch(boxes.reshape(-1, 2, 2), original_size).reshape(-1, 4)
