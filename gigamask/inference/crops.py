"""Crops of an image around what is prompted: where they lie, and prompts and answers in them.

Prompts are mapped to a crop and the answers back, so that an answer in a crop is used like any
other, also as the next mask prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from gigamask.masks import windows
from gigamask.masks.transforms import ImageTransform, whole_image
from gigamask.models.prompt_encoder import CORNER_LABELS
from gigamask.types import OUTSIDE_LOGIT, Prediction, Prompts

CROP_FACTOR = 1.5
"""Side of a crop, relative to the longer side of what is prompted."""
WHOLE_FRACTION = 0.8
"""Side of a crop from which the whole image is used instead, relative to its longer side."""
STEPS_PER_REGION = 16
"""A region's edges are rounded to at least this fraction of it, so that rounds share crops."""


def pasted_answer(
    answer: Prediction, crops: Sequence[ImageTransform], transform: ImageTransform
) -> Prediction:
    """Return answers on the grids of crops as answers for the whole image.

    Outside of a crop nothing is foreground.

    Args:
        answer: Low-resolution logits and predicted IoU of each prompt.
        crops: Crop of each.
        transform: Transform of the whole image.
    """
    low = answer.low_res_logits
    logits = torch.full((*low.shape[:2], *transform.original), OUTSIDE_LOGIT, device=low.device)
    for row, (crop, each) in enumerate(zip(crops, low, strict=True)):
        y0, x0, y1, x1 = crop.crop
        logits[row, :, y0:y1, x0:x1] = as_image(crop).logits_to_original(each[None])[0]
    pasted = paste_crops(low, crops, transform)
    return replace(answer, logits=logits, low_res_logits=pasted.to(low.dtype), in_window=None)


def as_image(crop: ImageTransform) -> ImageTransform:
    """Return the transform of a crop as if it were an image."""
    size = crop.crop_size
    return replace(crop, original=size, crop=(0, 0, *size))


def prompted_regions(
    prompts: Prompts, transform: ImageTransform, sources: Sequence[ImageTransform]
) -> Float64[np.ndarray, "M 4"]:
    """Return the edges x0 y0 x1 y1 of what is prompted, in original pixels; NaN where it is empty.

    That is the box, or else the extent of the mask prompt, with the positive clicks.

    Args:
        prompts: Prompts for the whole image.
        transform: Transform of the whole image.
        sources: The image or crop that each mask prompt is a mask of.
    """
    points = transform.points_to_original(prompts.points_xy_input.cpu().double().numpy())
    labels = prompts.labels.cpu().numpy()
    corners = _extents_of_points(points, np.isin(labels, CORNER_LABELS))
    objects = corners
    if prompts.masks is not None:
        masks = prompts.masks > 0
        if prompts.has_mask_prompt is not None:
            masks &= prompts.has_mask_prompt[:, None, None]
        pairs = zip(masks, sources, strict=True)
        extents = np.concatenate([extents_of_masks(mask[None], source) for mask, source in pairs])
        objects = np.where(np.isfinite(corners), corners, extents)
    clicks = _extents_of_points(points, labels == 1)
    first = np.minimum(objects[:, :2], clicks[:, :2])
    last = np.maximum(objects[:, 2:], clicks[:, 2:])
    regions = np.concatenate([first, last], 1)
    regions[~np.isfinite(regions).all(1)] = np.nan
    height, width = transform.original
    return regions.clip(0, (width, height, width, height))


def _extents_of_points(
    points: Float64[np.ndarray, "M N 2"], chosen: Bool[np.ndarray, "M N"]
) -> Float64[np.ndarray, "M 4"]:
    """Return the edges of the chosen pixels, infinite where there are none."""
    first = np.where(chosen[..., None], points, np.inf).min(1, initial=np.inf)
    last = np.where(chosen[..., None], points + 1, -np.inf).max(1, initial=-np.inf)
    return np.concatenate([first, last], 1)


def extents_of_masks(
    masks: Bool[Tensor, "M G G"], transform: ImageTransform
) -> Float64[np.ndarray, "M 4"]:
    """Return the edges of masks in original pixels, without the padding; infinite if empty.

    Args:
        masks: Masks on the grid of an image or a crop.
        transform: Its transform.
    """
    cell, extents = transform.image_size / masks.shape[-1], []
    (height, width), scale_xy = transform.resized, transform.scale_xy
    rows, columns = (int(np.ceil(length / cell)) for length in (height, width))
    inside = masks[:, :rows, :columns]
    for axis, scale in zip((1, 2), scale_xy, strict=True):
        line = inside.any(axis).cpu().numpy()
        edges = np.arange(line.shape[1] + 1) * (cell / scale)
        first = np.where(line, edges[:-1], np.inf).min(1, initial=np.inf)
        last = np.where(line, edges[1:], -np.inf).max(1, initial=-np.inf)
        extents.append((first, last))
    (x0, x1), (y0, y1) = extents
    origin = np.array(transform.crop[1::-1] * 2)
    return np.stack([x0, y0, x1, y1], 1) + origin


def crop_around(
    region: Float64[np.ndarray, "4"], transform: ImageTransform, min_side: int
) -> ImageTransform:
    """Return the transform of the crop around a region, which may be the whole image.

    The crop is a square that lies in the image, or, where it is larger than a side of the image, a
    rectangle.

    Args:
        region: Edges x0 y0 x1 y1 in original pixels.
        transform: Transform of the whole image.
        min_side: Smallest side of the crop in original pixels.
    """
    longer = max((region[2:] - region[:2]).max(), min_side / CROP_FACTOR)
    step = 2.0 ** np.floor(np.log2(max(longer / STEPS_PER_REGION, 1)))
    first, last = np.split(np.round(region / step) * step, 2)
    side = max(int(np.ceil(CROP_FACTOR * (last - first).max())), min_side)
    if side >= WHOLE_FRACTION * max(transform.original):
        return transform
    size_xy = np.minimum(side, transform.original[::-1])
    origin = np.round((first + last - size_xy) / 2).clip(0, transform.original[::-1] - size_xy)
    (x0, y0), (x1, y1) = origin.astype(int).tolist(), (origin + size_xy).astype(int).tolist()
    return crop_of((x0, y0, x1, y1), transform)


def crop_of(box: tuple[int, int, int, int], transform: ImageTransform) -> ImageTransform:
    """Return the transform of a crop.

    Args:
        box: The crop, `xyxy` with exclusive ends.
        transform: Transform of the whole image.
    """
    x0, y0, x1, y1 = box
    alone = whole_image((y1 - y0, x1 - x0), transform.image_size, transform.stretch)
    return replace(alone, original=transform.original, crop=(y0, x0, y1, x1))


def prompts_in_crops(
    prompts: Prompts,
    rows: Sequence[int],
    crops: Sequence[ImageTransform],
    transform: ImageTransform,
    sources: Sequence[ImageTransform],
) -> Prompts:
    """Return some prompts with coordinates and mask prompts of crops.

    Points outside a crop are mapped like others.

    Args:
        prompts: Prompts for the whole image.
        rows: Prompts to select.
        crops: Crop of each of them.
        transform: Transform of the whole image.
        sources: The image or crop that each mask prompt, of all prompts, is a mask of.
    """
    selected = prompts.select(torch.tensor(rows, device=prompts.labels.device))
    points, labels, masks = selected.points_xy_input, selected.labels, selected.masks
    pixels = transform.points_to_original(points.cpu().double().numpy())
    mapped = [crop.points_to_input(each) for crop, each in zip(crops, pixels, strict=True)]
    moved = torch.from_numpy(np.stack(mapped)).to(points)
    return replace(
        selected,
        points_xy_input=torch.where((labels >= 0)[..., None], moved, points),
        masks=None if masks is None else _crop_masks(masks, crops, [sources[row] for row in rows]),
    )


def _crop_masks(
    masks: Float[Tensor, "R G G"],
    crops: Sequence[ImageTransform],
    sources: Sequence[ImageTransform],
) -> Float[Tensor, "R G G"]:
    """Return logits of the whole image or of other crops, sampled on the grids of crops."""
    wide, side = masks.to(torch.promote_types(masks.dtype, torch.float32)), masks.shape[-1]
    frames = _frames(crops, sources, side).to(wide)
    matrices = windows.sampling_matrices(frames, (side, side), side)
    covered = windows.coverage(matrices)
    sampled = windows.sample_per_window(wide, matrices) / covered.clamp(min=1e-6)
    return torch.where(covered > 1e-6, sampled, OUTSIDE_LOGIT)


def paste_crops(
    low: Float[Tensor, "R K G G"], crops: Sequence[ImageTransform], transform: ImageTransform
) -> Float[Tensor, "R K G G"]:
    """Return low-resolution logits of crops on the grid of the whole image.

    Values are interpolated at the centers of cells; where those miss most of a mask, because it is
    small or thin, each cell has the highest logit in it.

    Args:
        low: Logits on the grids of crops.
        crops: The crops.
        transform: Transform of the whole image.
    """
    wide = low.to(torch.promote_types(low.dtype, torch.float32)).flatten(0, 1)
    side = low.shape[-1]
    frames = (
        _frames(crops, [transform] * len(crops), side).to(wide).repeat_interleave(low.shape[1], 0)
    )
    pasted = windows.paste(wide, frames, side, OUTSIDE_LOGIT)
    cells_per_sample = (frames[:, 2:] - frames[:, :2]).prod(1) / side**2
    area, shown = (wide > 0).sum((1, 2)) * cells_per_sample, (pasted > 0).sum((1, 2))
    missed = torch.where(2 * shown < area)[0]
    pasted[missed] = _highest_in_cells(wide[missed], frames[missed])
    return pasted.view(low.shape)


def _highest_in_cells(
    maps: Float[Tensor, "R G G"], frames: Float[Tensor, "R 4"]
) -> Float[Tensor, "R G G"]:
    """Return the highest value in each cell of the whole image's grid."""
    side = maps.shape[-1]
    fractions = (torch.arange(side, device=maps.device) + 0.5) / side
    first, last = frames[:, :2, None], frames[:, 2:, None]
    columns, rows = (first + fractions * (last - first)).long().clamp(0, side - 1).unbind(1)
    cells = (rows[:, :, None] * side + columns[:, None, :]).flatten(1)
    outside = torch.full_like(maps, OUTSIDE_LOGIT).flatten(1)
    return outside.scatter_reduce(1, cells, maps.flatten(1), "amax", include_self=False).view(
        maps.shape
    )


def _frames(
    crops: Sequence[ImageTransform], sources: Sequence[ImageTransform], side: int
) -> Float[Tensor, "R 4"]:
    """Return the edges of the crops' square inputs, in cells of their sources' grids."""
    frames = []
    for crop, source in zip(crops, sources, strict=True):
        scale = np.array(source.scale_xy) * (side / source.image_size)
        first = np.array(crop.crop[1::-1]) - source.crop[1::-1]
        last = first + crop.image_size / np.array(crop.scale_xy)
        frames.append(np.concatenate([first * scale, last * scale]))
    return torch.from_numpy(np.stack(frames))
