"""`SamAutomaticMaskGenerator`: masks of everything in an image, from a grid of points.

Parameters, records, order and filters are those of Segment Anything's class. Each point of a grid
yields three masks. Masks with high predicted IoU and stability that are not cut off by a crop's
edge are kept. Non-maximum suppression on boxes keeps the best of overlapping masks, and across
crops that of the smallest crop. Two optimizations leave the masks unchanged: only masks that pass
by predicted IoU are resized to the image, and masks are run lengths from then on.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64
from torch import Tensor

from gigamask.distributed.precision import PrecisionName
from gigamask.errors import GigamaskError, check_choice
from gigamask.inference.amg_config import AutomaticMaskConfig, check_tiles
from gigamask.inference.classes import class_fields, class_scores
from gigamask.inference.predictor import MASK_THRESHOLD, SamPredictor, pixels_of
from gigamask.inference.tiles import TileGrid, match_masks
from gigamask.masks.boxes import box_area, is_box_near_crop_edge, nms
from gigamask.masks.components import paste
from gigamask.masks.devices import as_array, encode_boxes
from gigamask.masks.rle import RLEMasks, union
from gigamask.masks.transforms import LogitStack, above, count_pixels, logit_stacks
from gigamask.models.embedding_cache import EmbeddingCache
from gigamask.models.prompt_decoder import PromptDecoder
from gigamask.models.prompt_encoder import make_prompts
from gigamask.models.promptable import PromptableModel

EDGE_TOLERANCE_PX = 20.0
"""A box this close to a crop's side within the image counts as cut off (SAM's `utils/amg.py`)."""
CUT_CELLS = 2.0
"""A mask this close to a tile's side, in cells of low-resolution masks, counts as cut by it."""
CHUNK_BYTES = 2**26
"""Bytes of float32 logits, in the masks' boxes at the crop's size, that are processed together."""
OUTPUT_MODES = ("binary_mask", "uncompressed_rle", "coco_rle")

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class MaskProposals:
    """Masks at the image's size, best first.

    Boxes are `xyxy` with inclusive ends, points are the `xy` that each mask was generated from, and
    crops are `xyxy` with exclusive ends. Class scores are the probabilities of the C classes; None
    if the model has no classes.
    """

    masks: RLEMasks
    boxes: Int64[np.ndarray, "n 4"]
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]
    points_xy: Float64[np.ndarray, "n 2"]
    crops: Int64[np.ndarray, "n 4"]
    class_scores: Float32[np.ndarray, "n C"] | None = None

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def certainty(self) -> Float64[np.ndarray, "n"]:
        """The mean of predicted IoU and stability; a stability that is not a number counts as 0."""
        stability = np.nan_to_num(self.stability_score)
        return (self.predicted_iou.astype(np.float64) + stability) / 2

    def __getitem__(self, chosen: np.ndarray) -> "MaskProposals":
        """Return some proposals, selected by indices or by a boolean mask."""
        columns = {name: value for name, value in vars(self).items() if value is not None}
        return MaskProposals(**{name: value[chosen] for name, value in columns.items()})

    @staticmethod
    def concatenate(parts: "Sequence[MaskProposals]") -> "MaskProposals":
        """Return the proposals of all parts in order."""
        masks = RLEMasks.concatenate([part.masks for part in parts])
        columns = vars(parts[0]).items()
        names = [name for name, value in columns if name != "masks" and value is not None]
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return MaskProposals(masks, **arrays)


@dataclass(eq=False, repr=False)
class SamAutomaticMaskGenerator:
    """Generates masks of everything in an image.

    Thresholds, `point_grids`, `points_per_batch` and `output_mode` are attributes that a program
    may set; `point_grids` has the points of each layer also where they were made from
    `points_per_side`. Thresholds outside of [0, 1] are a warning.

    Args:
        model: Model that embeds images and predicts masks.
        points_per_side: Points along each side of the image; None with `point_grids`.
        points_per_batch: Points per pass of the mask decoder; affects speed and memory only.
        pred_iou_thresh: Keep masks with a predicted IoU above this; 0 keeps all. None: that of the
            model's decoder, 0.88 for SAM's.
        stability_score_thresh: Keep masks with at least this stability score; 0 keeps all. None:
            that of the model's decoder, 0.95 for SAM's.
        stability_score_offset: Distance of the stability score's two thresholds from the mask
            threshold, in logits.
        box_nms_thresh: Box IoU above which only the best mask of a crop is kept.
        crop_n_layers: Layers of crops besides the whole image; layer i has 2^i crops per side.
        crop_nms_thresh: Box IoU above which only the mask of the smaller crop is kept.
        crop_overlap_ratio: Overlap of the crops of layer 1 as a fraction of the image's short side;
            halves with each layer.
        crop_n_points_downscale_factor: `points_per_side` is divided by this to the power of the
            layer.
        point_grids: Instead of `points_per_side`, `(n, 2)` points in [0, 1] for each layer,
            relative to a crop's width and height.
        min_mask_region_area: Area in pixels below which holes are filled and islands removed; 0
            disables.
        output_mode: Format of the segmentation: `(H, W)` bools, or a dict of `size` and `counts`,
            the latter as a list of run lengths or as COCO's compressed string.
        cache: Cache of embeddings on disk, keyed by weights and pixels.
        precision: As for `SamPredictor`.
        tile: Side in pixels of the tiles in which larger images are processed, each with its own
            points; masks are joined over their borders. None: images are processed as a whole.
        halo: Overlap of neighboring tiles in pixels; None: an eighth of a tile.

    Raises:
        GigamaskError: A parameter is out of range, or not exactly one of `points_per_side` and
            `point_grids` is given.
    """

    model: PromptableModel
    points_per_side: int | None = 32
    points_per_batch: int = 64
    pred_iou_thresh: float | None = None
    stability_score_thresh: float | None = None
    stability_score_offset: float = 1.0
    box_nms_thresh: float = 0.7
    crop_n_layers: int = 0
    crop_nms_thresh: float = 0.7
    crop_overlap_ratio: float = 512 / 1500
    crop_n_points_downscale_factor: int = 1
    point_grids: Sequence[np.ndarray] | None = None
    min_mask_region_area: int = 0
    output_mode: Literal["binary_mask", "uncompressed_rle", "coco_rle"] = "binary_mask"
    _: KW_ONLY
    cache: EmbeddingCache | None = None
    precision: PrecisionName = "auto"
    tile: int | None = None
    halo: int | None = None

    def __post_init__(self) -> None:
        self.predictor = SamPredictor(self.model, cache=self.cache, precision=self.precision)
        config, layers = self.config, self.crop_n_layers
        if (self.points_per_side is None) == (self.point_grids is None):
            raise GigamaskError("pass either points_per_side or point_grids, and the other as None")
        if self.point_grids is not None and len(self.point_grids) <= layers:
            raise GigamaskError(
                f"point_grids must have one grid for the image and each of {layers} layers of "
                f"crops (got {len(self.point_grids)})"
            )
        for grid in map(as_array, () if self.point_grids is None else self.point_grids):
            is_grid = grid.ndim == 2 and grid.shape[1] == 2
            if not is_grid or not grid.size or grid.min() < 0 or grid.max() > 1:
                raise GigamaskError(
                    "point_grids must have (n, 2) points in [0, 1], relative to a crop's width and "
                    "height"
                )
        check_choice("output_mode", self.output_mode, OUTPUT_MODES)
        thresholds = config.thresholds(self.predictor.model.config.decoder)
        self.pred_iou_thresh, self.stability_score_thresh = thresholds
        if self.point_grids is None:
            sides = map(config.points_in_layer, range(layers + 1))
            self.point_grids = [build_point_grid(side) for side in sides]

    @property
    def config(self) -> AutomaticMaskConfig:
        """The numeric parameters."""
        names = [field.name for field in fields(AutomaticMaskConfig)]
        return _GivenConfig(**{name: getattr(self, name) for name in names})

    def generate(self, image: np.ndarray | Tensor | str | Path) -> list[dict[str, Any]]:
        """Generate the masks of an image, best first.

        Args:
            image: `(H, W, 3)` RGB pixels in uint8, or pixels or a path as for
                `SamPredictor.set_image`.

        Returns:
            One record per mask: segmentation, area (pixels), bbox (x, y, w, h), predicted_iou,
            point_coords (x and y of the point that the mask was generated from), stability_score
            and crop_box (x, y, w, h); category_id, category and class_score if the model has
            classes.

        Raises:
            GigamaskError: The image has another shape or type.
        """
        proposals = self.generate_proposals(image)
        encoded = encode_masks(proposals.masks, self.output_mode)
        pixels = proposals.masks.areas().tolist()
        classes = class_fields(proposals.class_scores, self.predictor.model.config.class_names)
        return [
            {
                "segmentation": encoded[i],
                "area": pixels[i],
                "bbox": _xywh(proposals.boxes[i]),
                "predicted_iou": float(proposals.predicted_iou[i]),
                "point_coords": [proposals.points_xy[i].tolist()],
                "stability_score": float(proposals.stability_score[i]),
                "crop_box": _xywh(proposals.crops[i]),
                **(classes[i] if classes else {}),
            }
            for i in range(len(proposals))
        ]

    @torch.no_grad()
    def generate_proposals(
        self,
        image: np.ndarray | Tensor | str | Path,
        progress: Callable[[float], object] | None = None,
    ) -> MaskProposals:
        """Generate the masks of an image as run lengths, best first.

        Args:
            image: Pixels or a path as for `generate`.
            progress: Called before each batch of points with the fraction of the image that is
                done; what it raises, such as a request to stop, ends the generation.
        """
        image = pixels_of(image, "image", self.predictor.model.config.pixels)
        size = image.shape[:2]
        if self.tile and max(size) > self.tile:
            grid = TileGrid(size, self.tile, check_tiles(self.tile, self.halo))
            return self._process_tiles(image, grid, progress)
        crops = generate_crop_boxes(size, self.crop_n_layers, self.crop_overlap_ratio)
        proposals = MaskProposals.concatenate(
            [
                self._process_crop(image, crop, layer, _part_of(progress, i, len(crops)))
                for i, (crop, layer) in enumerate(crops)
            ]
        )
        if len(crops) > 1:
            scores = np.float32(1) / box_area(proposals.crops)
            proposals = proposals[nms(proposals.boxes, scores, self.crop_nms_thresh)]
        if self.min_mask_region_area:
            threshold = max(self.box_nms_thresh, self.crop_nms_thresh)
            proposals = postprocess_small_regions(proposals, self.min_mask_region_area, threshold)
        return proposals

    def _process_tiles(
        self, image: np.ndarray, grid: TileGrid, progress: Callable[[float], object] | None
    ) -> MaskProposals:
        """Return the masks of all tiles, joined over their borders."""
        parts = [
            self._process_crop(image, tile, 0, _part_of(progress, i, len(grid.boxes)), is_tile=True)
            for i, tile in enumerate(grid.boxes)
        ]
        proposals = MaskProposals.concatenate(parts)
        tile_index = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        cell = grid.tile / self.predictor.model.config.mask_size
        groups = match_masks(
            proposals.masks, proposals.predicted_iou, tile_index, grid, CUT_CELLS * cell
        )
        joined = join_proposals(proposals, groups)
        return joined[nms(joined.boxes, joined.predicted_iou, self.crop_nms_thresh)]

    def _process_crop(
        self,
        image: np.ndarray,
        crop: Box,
        layer: int,
        progress: Callable[[float], object],
        is_tile: bool = False,
    ) -> MaskProposals:
        """Return the masks of one crop or tile, in coordinates of the image."""
        x0, y0, x1, y1 = crop
        corner = np.array([x0, y0])
        self.predictor.set_image(image[y0:y1, x0:x1])
        assert self.point_grids is not None
        grid = as_array(self.point_grids[layer]).astype(np.float64).reshape(-1, 2)
        points = grid * np.array([x1 - x0, y1 - y0])
        size, step = image.shape[:2], self.points_per_batch
        parts = [_no_proposals(crop, len(self.predictor.model.config.class_names))]
        for i in range(0, len(points), step):
            progress(i / len(points))
            parts.append(self._process_batch(points[i : i + step], crop, size))
        proposals = MaskProposals.concatenate(parts)
        self.predictor.reset_image()
        proposals = proposals[nms(proposals.boxes, proposals.predicted_iou, self.box_nms_thresh)]
        if is_tile and self.min_mask_region_area:
            # Within tiles, since the masks of a large image would take long.
            area = self.min_mask_region_area
            proposals = postprocess_small_regions(proposals, area, self.box_nms_thresh)
        return replace(
            proposals,
            masks=paste(proposals.masks, x0, y0, size),
            boxes=proposals.boxes + np.tile(corner, 2),
            points_xy=proposals.points_xy + corner,
        )

    def _process_batch(
        self, points: Float64[np.ndarray, "n 2"], crop: Box, size: tuple[int, int]
    ) -> MaskProposals:
        """Return the masks of some points that pass the filters, in coordinates of the crop."""
        x0, y0, x1, y1 = crop
        predictor = self.predictor
        transform = predictor.transform.image_transform((y1 - y0, x1 - x0))
        coords = predictor.transform.apply_coords(points, transform.original)
        prompts = make_prompts(
            torch.from_numpy(coords)[:, None],
            torch.ones(len(points), 1, dtype=torch.int64),
            None,
            None,
            True,
            predictor.model.config.mask_size,
        )
        with predictor.autocast():
            prediction = PromptDecoder(predictor.model, predictor.get_image_embedding())(prompts)
        low = prediction.low_res_logits.flatten(0, 1)
        iou = prediction.iou_predictions.float().flatten()
        named = prediction.class_logits
        named = None if named is None else class_scores(named.flatten(0, 1)).cpu().numpy()
        mask_points = np.repeat(points, prediction.iou_predictions.shape[1], axis=0)
        least_iou, least_stability = self.config.thresholds(predictor.model.config.decoder)
        good = torch.nonzero((iou > least_iou) | (least_iou <= 0))[:, 0]
        offset, threshold = self.stability_score_offset, predictor.model.mask_threshold
        numbers, iou_of = good.cpu().numpy(), iou.cpu().numpy()
        order, found = [], [_no_proposals(crop, len(predictor.model.config.class_names))]
        for group in _groups(logit_stacks(transform, low[good], min(threshold - offset, 0.0))):
            stability = [
                calculate_stability_score(logits, offset, threshold) for _, logits, _ in group
            ]
            scores = torch.cat(stability).cpu().numpy()
            stable = (scores >= least_stability) | (least_stability <= 0)
            index = np.concatenate([index for index, *_ in group])[stable]
            masks = encode_boxes(_masks_of(group, stable, threshold), transform.original)
            chosen = numbers[index]
            proposals = MaskProposals(
                masks,
                _boxes(masks),
                iou_of[chosen],
                scores[stable],
                mask_points[chosen],
                _repeat(crop, len(chosen)),
                None if named is None else named[chosen],
            )
            boxes = proposals.boxes + np.array([x0, y0, x0, y0])
            at_edge = is_box_near_crop_edge(boxes, crop, size, EDGE_TOLERANCE_PX)
            kept = ~at_edge | (self.tile is not None)
            order.append(index[kept])
            found.append(proposals[kept])
        proposals = MaskProposals.concatenate(found)
        return proposals[np.argsort(np.concatenate(order))] if order else proposals


class _GivenConfig(AutomaticMaskConfig):
    """The numeric parameters of a program, which may be as it likes where SAM's class takes it."""

    def refuse(self, message: str) -> None:
        """Warn of a parameter that cannot be meant."""
        warnings.warn(message, stacklevel=2)


def join_proposals(proposals: MaskProposals, groups: Int64[np.ndarray, "n"]) -> MaskProposals:
    """Return one mask for each group: the union, with the mean scores by area.

    What is left is that of the group's largest mask; its crop is the box around all crops.

    Args:
        proposals: Masks of the image.
        groups: Group of each, from 0; -1: the mask is not used.
    """
    used = np.flatnonzero(groups >= 0)
    proposals, groups = proposals[used], groups[used]
    areas = proposals.masks.areas()
    order = np.lexsort([-areas, groups])
    _, first = np.unique(groups[order], return_index=True)
    weights = np.maximum(areas, 1)
    totals = np.bincount(groups, weights)
    iou, stability = (
        (np.bincount(groups, weights * score) / totals).astype(np.float32)
        for score in (proposals.predicted_iou, proposals.stability_score)
    )
    crops = proposals.crops[order]
    ends = [
        end.reduceat(crops[:, part], first)
        for end, part in ((np.minimum, slice(2)), (np.maximum, slice(2, 4)))
        if len(first)
    ]
    masks = union(proposals.masks, groups, len(first))
    return replace(
        proposals[order[first]],
        masks=masks,
        boxes=_boxes(masks),
        predicted_iou=iou,
        stability_score=stability,
        crops=np.concatenate(ends, 1) if ends else crops,
    )


def build_point_grid(n_per_side: int) -> Float64[np.ndarray, "n 2"]:
    """Return `n_per_side ** 2` points `xy`, the centers of equal cells of the unit square."""
    offset = 1 / (2 * n_per_side)
    line = np.linspace(offset, 1 - offset, n_per_side)
    return np.stack([np.tile(line, n_per_side), np.repeat(line, n_per_side)], -1)


def generate_crop_boxes(
    size: tuple[int, int], layers: int, overlap_ratio: float
) -> list[tuple[Box, int]]:
    """Return the crops of an image, column by column.

    Args:
        size: Height and width of the image.
        layers: Layers of crops besides the whole image.
        overlap_ratio: Overlap of the crops of layer 1 as a fraction of the image's short side.

    Returns:
        Boxes `xyxy` with exclusive ends and their layers; the first is the whole image, layer 0.
    """
    height, width = size
    crops = [((0, 0, width, height), 0)]
    for layer in range(1, layers + 1):
        count = 2**layer
        overlap = int(overlap_ratio * min(size) * (2 / count))
        crop_w, crop_h = (
            math.ceil((overlap * (count - 1) + side) / count) for side in (width, height)
        )
        for i, j in product(range(count), range(count)):
            x0, y0 = (crop_w - overlap) * i, (crop_h - overlap) * j
            if x0 < width and y0 < height:  # tiny images have fewer crops
                crops.append(((x0, y0, min(x0 + crop_w, width), min(y0 + crop_h, height)), layer))
    return crops


def calculate_stability_score(
    logits: Float[Tensor, "n H W"], threshold_offset: float, mask_threshold: float = MASK_THRESHOLD
) -> Float32[Tensor, "n"]:
    """Return the IoU between each mask thresholded above and below the mask threshold.

    Args:
        logits: Logits of n masks, or those in a box outside of which all are below both thresholds.
        threshold_offset: Distance of either threshold from the mask threshold, in logits.
        mask_threshold: Logits above this are foreground.

    Returns:
        `(n,)`; NaN if both are empty.
    """
    thresholds = mask_threshold + threshold_offset, mask_threshold - threshold_offset
    inner, outer = (count_pixels(above(logits, threshold)) for threshold in thresholds)
    return inner / outer


def _groups(stacks: Iterator[LogitStack]) -> Iterator[list[LogitStack]]:
    """Yield stacks in groups of `CHUNK_BYTES`."""
    size, group = 0, []
    for stack in stacks:
        group.append(stack)
        size += stack[1].nbytes
        if size >= CHUNK_BYTES:
            yield group
            size, group = 0, []
    if group:
        yield group


def _masks_of(
    group: Sequence[LogitStack], kept: Bool[np.ndarray, "n"], threshold: float
) -> list[tuple[Bool[Tensor, "_ _ _"], Int64[np.ndarray, "_ 2"]]]:
    """Return the masks of stacks that are kept, and the first row and column of each."""
    masks, start = [], 0
    for index, logits, corners in group:
        chosen = np.flatnonzero(kept[start : start + len(index)])
        start += len(index)
        if not len(chosen):
            continue
        if len(chosen) < len(index):
            logits = logits[torch.from_numpy(chosen).to(logits.device)]
        masks.append((above(logits, threshold), corners[chosen]))
    return masks


def postprocess_small_regions(
    proposals: MaskProposals, min_area: int, nms_thresh: float
) -> MaskProposals:
    """Fill small holes, remove small islands, and suppress masks that then overlap.

    Args:
        proposals: Masks of the image.
        min_area: Area in pixels below which a hole is filled and an island removed.
        nms_thresh: Box IoU above which only the first mask is kept.

    Returns:
        The masks that are kept, unchanged ones first.
    """
    parts = [RLEMasks.from_dense(np.zeros((0, *proposals.masks.size), bool))]
    changed = np.zeros(len(proposals), bool)
    for i in range(len(proposals)):
        original = proposals.masks[i : i + 1]
        mask, filled = remove_small_regions(original.to_dense()[0], min_area, "holes")
        mask, removed = remove_small_regions(mask, min_area, "islands")
        changed[i] = filled or removed
        parts.append(RLEMasks.from_dense(mask[None]) if changed[i] else original)
    masks = RLEMasks.concatenate(parts)
    boxes = _boxes(masks)
    merged = np.where(changed[:, None], boxes, proposals.boxes)
    cleaned = replace(proposals, masks=masks, boxes=merged)
    return cleaned[nms(boxes, (~changed).astype(np.float32), nms_thresh)]


def remove_small_regions(
    mask: Bool[np.ndarray, "H W"], area_thresh: int, mode: Literal["holes", "islands"]
) -> tuple[Bool[np.ndarray, "H W"], bool]:
    """Fill the small holes of a mask, or remove its small islands.

    Regions are 8-connected. If all islands are small, the largest is kept.

    Args:
        mask: The mask.
        area_thresh: Area in pixels below which a region is small.
        mode: "holes" or "islands".

    Returns:
        The mask, and whether it was changed.
    """
    holes = mode == "holes"
    count, labels, stats, _ = cv2.connectedComponentsWithStats(
        (mask ^ holes).astype(np.uint8), connectivity=8
    )
    sizes = stats[1:, cv2.CC_STAT_AREA]
    small = sizes < area_thresh
    if not small.any():
        return mask, False
    foreground = np.empty(count, bool)
    foreground[0], foreground[1:] = holes, small if holes else ~small
    if not holes and small.all():
        foreground[1 + int(sizes.argmax())] = True
    return foreground[labels], True


def encode_masks(masks: RLEMasks, output_mode: str) -> list[Any]:
    """Encode each mask as the segmentation of a record.

    Args:
        masks: Masks of the image.
        output_mode: As for `SamAutomaticMaskGenerator`.
    """
    check_choice("output_mode", output_mode, OUTPUT_MODES)
    if output_mode == "binary_mask":
        return list(masks.to_dense())
    size = list(masks.size)
    if output_mode == "coco_rle":
        return [{"size": size, "counts": counts.decode()} for counts in masks.to_coco()]
    bounds = np.split(masks.bounds, masks.offsets[1:-1]) if len(masks) else []
    return [
        {"size": size, "counts": np.diff(ends, prepend=0, append=size[0] * size[1]).tolist()}
        for ends in bounds
    ]


def _part_of(
    progress: Callable[[float], object] | None, number: int, count: int
) -> Callable[[float], object]:
    """Return the progress of one of several parts of an image."""
    return lambda fraction: progress and progress((number + fraction) / count)


def _no_proposals(crop: Box, classes: int) -> MaskProposals:
    x0, y0, x1, y1 = crop
    masks = RLEMasks.from_dense(np.zeros((0, y1 - y0, x1 - x0), bool))
    scores = np.zeros(0, np.float32)
    named = np.zeros((0, classes), np.float32) if classes else None
    points, crops = np.zeros((0, 2)), _repeat(crop, 0)
    return MaskProposals(masks, _boxes(masks), scores, scores, points, crops, named)


def _boxes(masks: RLEMasks) -> Int64[np.ndarray, "n 4"]:
    """Return boxes `xyxy` with inclusive ends; that of an empty mask is 0 0 0 0, as in SAM."""
    return masks.boxes().astype(np.int64).clip(0)


def _repeat(crop: Box, count: int) -> Int64[np.ndarray, "n 4"]:
    return np.tile(np.array(crop, np.int64), (count, 1))


def _xywh(box: Int64[np.ndarray, "4"]) -> list[int]:
    x0, y0, x1, y1 = box.tolist()
    return [x0, y0, x1 - x0, y1 - y0]
