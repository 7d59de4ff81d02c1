"""Encoding of images without their padding."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn


def encode_rectangles(
    encoder: nn.Module,
    pixels: Float[Tensor, "B N S S"],
    input_sizes: Int64[Tensor, "B 2"],
    drop_path: Float[Tensor, "B L 2"] | None,
    patch: int,
) -> Float[Tensor, "B C E E"]:
    """Return the embeddings of images without their padding, which is zero.

    Images with the same number of tokens in height and width are encoded together; an embedding
    does not depend on the other images.

    Args:
        encoder: The image encoder.
        pixels: Normalized pixels, zero in the padding.
        input_sizes: Height and width of each image without padding, at the top left.
        drop_path: Uniform numbers that decide which branches are skipped; None in evaluation.
        patch: Side of a patch in pixels.
    """
    if input_sizes.is_meta or hasattr(input_sizes, "fake_mode"):
        return encoder(pixels, drop_path)  # planned for squares, which need the most memory
    side, parts, orders = pixels.shape[-1] // patch, [], []
    tokens = (-(-input_sizes // patch)).cpu()  # waits for a GPU once
    for height, width in tokens.unique(dim=0).tolist():
        rows = torch.nonzero((tokens[:, 0] == height) & (tokens[:, 1] == width))[:, 0]
        orders.append(rows)
        shown = pixels[
            rows.to(pixels.device, non_blocking=True), :, : height * patch, : width * patch
        ]
        uniforms = None if drop_path is None else drop_path[rows.to(drop_path.device)]
        embedding = encoder(shown, uniforms)
        parts.append(F.pad(embedding, (0, side - width, 0, side - height)))
    return torch.cat(parts)[torch.cat(orders).argsort().to(pixels.device, non_blocking=True)]
