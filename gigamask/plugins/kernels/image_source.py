"""Image tokens as kernels read them, and the sizes and gradients that follow."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from gigamask.plugins.kernels.operators import padded, parts

TILE = 16
"""Image tokens of a program that computes their gradients."""
SPLITS = 4
"""Programs that share the masks of all images, each with a sum of gradients of its own."""
Rows = Float[Tensor, "M N H C"]
Source = list[Tensor | None]
"""Image tokens, positions, index of images, features and their projection, as `ImageSource`."""


class ImageSource(NamedTuple):
    """Image tokens of M masks.

    Attributes:
        x: Those of each mask, or of each of B images if `shared`.
        positions: What is added to them for queries and keys.
        index: Index of each mask's image; None if there is only one, or if not `shared`.
        features: Features of mask prompts, whose projection is added; None if there are none.
        weight: The projection.
        shared: Whether masks share the tokens of their image.
    """

    x: Float[Tensor, "B T C"]
    positions: Float[Tensor, "T C"]
    index: Int64[Tensor, "M"] | None = None
    features: Float[Tensor, "M T F"] | None = None
    weight: Float[Tensor, "C F"] | None = None
    shared: bool = False


def sizes_of(source: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Return channels, features, both padded, and the channels of a block.

    Args:
        source: The image tokens.
    """
    x, _, _, features, _ = source
    assert x is not None
    channels, inner = x.shape[-1], 1 if features is None else features.shape[-1]
    return channels, inner, padded(channels), padded(inner), min(64, padded(channels))


def splits_of(x: Tensor, masks: int, shared: bool) -> tuple[int, int]:
    """Return how many programs share the masks of an image, and those of all images or masks.

    Args:
        x: Image tokens.
        masks: Number of masks.
        shared: Whether masks share the tokens of their image.
    """
    splits = max(1, SPLITS // len(x)) if shared else 1
    return splits, splits * len(x) if shared else masks


def source_shapes(
    x: Tensor, features: Tensor | None, shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty gradients of image tokens, of features, and of their projection.

    Those of shared tokens and of the projection are sums of each program.

    Args:
        x: Image tokens.
        features: Features of mask prompts.
        shared: Whether masks share the tokens of their image.
    """
    if not shared:
        return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
    _, programs = splits_of(x, 0, shared)
    of_image = x.new_empty(programs, *x.shape[1:], dtype=torch.float32)
    if features is None:
        return of_image, x.new_empty(0), x.new_empty(0)
    blocks = programs * parts(x.shape[1], TILE), padded(features.shape[-1]), padded(x.shape[-1])
    return of_image, torch.empty_like(features), x.new_empty(blocks, dtype=torch.float32)


def gradients_to_store(found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return where a kernel stores gradients: None in place of features that there are not.

    Args:
        found: What `source_shapes` returned.
    """
    return tuple(each if each.numel() else None for each in found)


def source_gradients(
    source: Sequence[Tensor | None], found: Sequence[Tensor], shared: bool
) -> tuple[Tensor | None, ...]:
    """Return the gradients of an `ImageSource`, in the order of its attributes.

    Args:
        source: The image tokens.
        found: What `source_shapes` describes.
        shared: Whether masks share the tokens of their image.
    """
    x, *_, weight = source
    of_image, of_features, of_weight = found
    if not shared or x is None:
        return of_image, None, None, None, None, None
    total = of_image.unflatten(0, (len(x), -1)).sum(1)
    if weight is None:
        return total, None, None, None, None, None
    projection = of_weight.sum(0)[: weight.shape[1], : weight.shape[0]].T
    return total, None, None, of_features, projection, None
