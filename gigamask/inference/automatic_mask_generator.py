"""Automatic masks: everything in an image is segmented. Parameters, records, order and filters are those of `SamAutomaticMaskGenerator`.

Enters: an image `(H, W, 3)` in uint8. Leaves: masks as runs with their scores and the point each was made from, or the reference code's records.
A grid of points is asked, three masks each; those pass whose predicted IoU and stability are high and which no crop's edge cuts off; of those
whose boxes overlap the best stays, and over crops that of the smallest crop. In two ways the work is less, the masks the same: logits are brought to
the image's size only of what passes by predicted IoU, and from there on masks are runs.

Not here: the numbers (`predict.settings`), boxes (`geometry.boxes`), writing SA-1B's json (`segmenting`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from gigamask.errors import GigamaskError
from gigamask.inference.amg_config import AutomaticMaskConfig
from gigamask.inference.embedding_cache import EmbeddingCache
from gigamask.inference.predictor import MASK_THRESHOLD, SamPredictor
from gigamask.masks.boxes import areas, near_edge, suppress
from gigamask.masks.rle import RLEMasks
from gigamask.models.sam.decoding import PromptDecoder
from gigamask.models.sam.prompts import make_prompts
from gigamask.models.sam.sam import Sam

EDGE_PX = 20.0
"""A box that ends so near a crop's side, within the image, is taken for cut off (`utils/amg.py`)."""
GROUP_BYTES = 2**26
"""Of float32 logits at the crop's size, which are looked at together."""
MODES = ("binary_mask", "uncompressed_rle", "coco_rle")

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class MaskProposals:
    """Masks at the image's size, best first: boxes `xyxy` with inclusive ends, scores, the point `xy` each was made from, and the crop, half-open."""

    masks: RLEMasks
    boxes: Int64[np.ndarray, "n 4"]
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]
    points_xy: Float64[np.ndarray, "n 2"]
    crops: Int64[np.ndarray, "n 4"]

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, chosen: np.ndarray) -> "MaskProposals":
        """Returns some of them, by number or by a bool for each."""
        return MaskProposals(**{name: value[chosen] for name, value in vars(self).items()})

    @staticmethod
    def concatenate(parts: "Sequence[MaskProposals]") -> "MaskProposals":
        """Returns all parts' in order."""
        masks = RLEMasks.concatenate([part.masks for part in parts])
        return MaskProposals(
            masks,
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in vars(parts[0])
                if name != "masks"
            },
        )


@dataclass(frozen=True, eq=False, repr=False)
class SamAutomaticMaskGenerator(AutomaticMaskConfig):
    """Segments everything in an image. `point_grids` `(n, 2)`, one a layer, in shares of a crop's width and height, stand in for a regular grid."""

    model: Sam
    point_grids: Sequence[np.ndarray] | None = None
    output_mode: Literal["binary_mask", "uncompressed_rle", "coco_rle"] = "binary_mask"
    cache: EmbeddingCache | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.points_per_side is None) == (self.point_grids is None):
            raise GigamaskError("give either points_per_side or point_grids, and the other as None")
        if self.point_grids is not None and len(self.point_grids) <= self.crop_n_layers:
            raise GigamaskError(
                f"{len(self.point_grids)} point_grids for the image and {self.crop_n_layers} layers of crops; give one for each"
            )
        if self.output_mode not in MODES:
            raise GigamaskError(
                f"output_mode is {self.output_mode!r}, known are {', '.join(MODES)}; give one of them"
            )

    @cached_property
    def predictor(self) -> SamPredictor:
        """Who is asked."""
        return SamPredictor(self.model, self.cache)

    def generate(self, image: np.ndarray) -> list[dict[str, Any]]:
        """Returns a record for each mask: segmentation, area, bbox, predicted_iou, point_coords, stability_score, crop_box; boxes are x, y, w, h.

        A segmentation is `(H, W)` bools, or a dict of `size` and `counts`, whichever `output_mode` says. Raises Fault for what is no uint8 RGB image.
        """
        found = self.find(image)
        shapes, covered = segmentations(found.masks, self.output_mode), found.masks.areas().tolist()
        return [
            {
                "segmentation": shapes[i],
                "area": covered[i],
                "bbox": _xywh(found.boxes[i]),
                "predicted_iou": float(found.predicted_iou[i]),
                "point_coords": [found.points_xy[i].tolist()],
                "stability_score": float(found.stability_score[i]),
                "crop_box": _xywh(found.crops[i]),
            }
            for i in range(len(found))
        ]

    @torch.no_grad()
    def find(self, image: np.ndarray) -> MaskProposals:
        """Returns everything found in an image, as `generate` does, with masks as runs."""
        size = (image.shape[0], image.shape[1])
        crops = crop_boxes(size, self.crop_n_layers, self.crop_overlap_ratio)
        found = MaskProposals.concatenate([self._look(image, crop, layer) for crop, layer in crops])
        if len(crops) > 1:
            found = found[
                suppress(found.boxes, np.float32(1) / areas(found.crops), self.crop_nms_thresh)
            ]
        if self.min_mask_region_area:
            found = remove_small_regions(
                found, self.min_mask_region_area, max(self.box_nms_thresh, self.crop_nms_thresh)
            )
        return found

    def _look(self, image: np.ndarray, crop: Box, layer: int) -> MaskProposals:
        """Returns what is found in one crop."""
        x0, y0, x1, y1 = crop
        corner = np.array([x0, y0])
        self.predictor.set_image(image[y0:y1, x0:x1])
        grid = (
            point_grid(self.points_in(layer))
            if self.point_grids is None
            else self.point_grids[layer]
        )
        points = np.asarray(grid, np.float64) * np.array([x1 - x0, y1 - y0])
        size, step = (image.shape[0], image.shape[1]), self.points_per_batch
        found = MaskProposals.concatenate(
            [
                part
                for i in range(0, len(points), step)
                for part in self._ask(points[i : i + step], crop, size)
            ]
        )
        self.predictor.reset_image()
        found = found[suppress(found.boxes, found.predicted_iou, self.box_nms_thresh)]
        return replace(
            found,
            masks=uncropped(found.masks, crop, size),
            boxes=found.boxes + np.tile(corner, 2),
            points_xy=found.points_xy + corner,
        )

    def _ask(
        self, points: Float64[np.ndarray, "n 2"], crop: Box, size: tuple[int, int]
    ) -> Iterator[MaskProposals]:
        """Yields what passes of some points' answers, in a crop's own coordinates."""
        x0, y0, x1, y1 = crop
        predictor, frame = self.predictor, self.predictor.transform.frame((y1 - y0, x1 - x0))
        asked = torch.from_numpy(predictor.transform.apply_coords(points, frame.original))[:, None]
        prompts = make_prompts(
            asked,
            torch.ones(len(asked), 1, dtype=torch.int64),
            None,
            None,
            True,
            self.model.config.mask_size,
        )
        answer = PromptDecoder(self.model, predictor.get_image_embedding())(prompts)
        low, iou = answer.low_res_logits.flatten(0, 1), answer.iou_predictions.float().flatten()
        owner = np.repeat(points, answer.iou_predictions.shape[1], axis=0)
        good = (
            torch.nonzero(iou > self.pred_iou_thresh)[:, 0]
            if self.pred_iou_thresh > 0
            else torch.arange(len(iou), device=iou.device)
        )
        yield self._none(crop)
        if not len(good):
            return
        for some in good.split(max(1, GROUP_BYTES // (4 * (y1 - y0) * (x1 - x0)))):
            logits = frame.logits_to_original(low[some][:, None])[:, 0]
            score = stability(logits, self.stability_score_offset)
            stable = (
                score >= self.stability_score_thresh
                if self.stability_score_thresh > 0
                else torch.ones_like(score, dtype=torch.bool)
            )
            masks = RLEMasks.from_dense((logits[stable] > MASK_THRESHOLD).cpu().numpy())
            chosen = some[stable].cpu().numpy()
            found = MaskProposals(
                masks,
                _boxes(masks),
                iou.cpu().numpy()[chosen],
                score[stable].cpu().numpy(),
                owner[chosen],
                _repeated(crop, len(chosen)),
            )
            yield found[~near_edge(found.boxes + np.array([x0, y0, x0, y0]), crop, size, EDGE_PX)]

    def _none(self, crop: Box) -> MaskProposals:
        """Returns no mask, of a crop's size."""
        x0, y0, x1, y1 = crop
        nothing = RLEMasks.from_dense(np.zeros((0, y1 - y0, x1 - x0), bool))
        scores = np.zeros(0, np.float32)
        return MaskProposals(
            nothing, _boxes(nothing), scores, scores, np.zeros((0, 2)), _repeated(crop, 0)
        )


def point_grid(side: int) -> Float64[np.ndarray, "n 2"]:
    """Returns side x side points `xy` in the middles of equal cells of the unit square, row by row."""
    offset = 1 / (2 * side)
    line = np.linspace(offset, 1 - offset, side)
    return np.stack([np.tile(line, side), np.repeat(line, side)], -1)


def crop_boxes(size: tuple[int, int], layers: int, overlap_ratio: float) -> list[tuple[Box, int]]:
    """Returns the image of `size` (H, W) and the crops of each layer, as `xyxy` with half-open ends, and their layer; column by column."""
    height, width = size
    found = [((0, 0, width, height), 0)]
    for layer in range(1, layers + 1):
        count = 2**layer
        overlap = int(overlap_ratio * min(size) * (2 / count))
        crop_w, crop_h = (
            math.ceil((overlap * (count - 1) + side) / count) for side in (width, height)
        )
        for i, j in product(range(count), range(count)):
            x0, y0 = (crop_w - overlap) * i, (crop_h - overlap) * j
            found.append(((x0, y0, min(x0 + crop_w, width), min(y0 + crop_h, height)), layer))
    return found


def stability(logits: Tensor, offset: float) -> Tensor:
    """Returns the IoU of each mask `(n, H, W)` cut `offset` above the threshold with itself cut as far below; nan where it is empty even there."""
    inner, outer = (
        torch.stack([torch.count_nonzero(each) for each in cut])
        for cut in (logits > MASK_THRESHOLD + offset, logits > MASK_THRESHOLD - offset)
    )
    return (
        inner / outer
    )  # counted mask by mask, on a CPU in a third of the time that a sum over two dimensions takes


def uncropped(masks: RLEMasks, crop: Box, size: tuple[int, int]) -> RLEMasks:
    """Returns a crop's masks on the whole image of `size` (H, W)."""
    if masks.size == size:
        return masks
    x0, y0, x1, y1 = crop
    rows, columns = np.full(size[0], -1), np.full(size[1], -1)
    rows[y0:y1], columns[x0:x1] = np.arange(y1 - y0), np.arange(x1 - x0)
    return masks.resample(rows, columns)


def remove_small_regions(found: MaskProposals, min_area: int, threshold: float) -> MaskProposals:
    """Returns masks without holes and islands below `min_area` pixels, and of those whose boxes then overlap above `threshold` the first.

    Masks that needed nothing go before those that did.
    """
    parts, changed = (
        [RLEMasks.from_dense(np.zeros((0, *found.masks.size), bool))],
        np.zeros(len(found), bool),
    )
    for i in range(len(found)):
        own = found.masks[i : i + 1]
        mask, filled = without_small(own.to_dense()[0], min_area, holes=True)
        mask, removed = without_small(mask, min_area, holes=False)
        changed[i] = filled or removed
        parts.append(RLEMasks.from_dense(mask[None]) if changed[i] else own)
    masks = RLEMasks.concatenate(parts)
    boxes = _boxes(masks)
    tidy = replace(found, masks=masks, boxes=np.where(changed[:, None], boxes, found.boxes))
    return tidy[suppress(boxes, (~changed).astype(np.float32), threshold)]


def without_small(
    mask: Bool[np.ndarray, "H W"], min_area: int, holes: bool
) -> tuple[Bool[np.ndarray, "H W"], bool]:
    """Returns a mask without its holes, or else its islands, below `min_area` pixels, and whether it had any; pieces hang together at corners, too.

    Of a mask of small islands alone the largest stays.
    """
    pieces, numbered, stats, _ = cv2.connectedComponentsWithStats(
        (mask ^ holes).astype(np.uint8), connectivity=8
    )
    sizes = stats[1:, cv2.CC_STAT_AREA]
    small = sizes < min_area
    if not small.any():
        return mask, False
    foreground = np.empty(pieces, bool)
    foreground[0], foreground[1:] = holes, small if holes else ~small
    if not holes and small.all():
        foreground[1 + int(sizes.argmax())] = True
    return foreground[numbered], True


def segmentations(masks: RLEMasks, mode: str) -> list[Any]:
    """Returns each mask as the reference code's `output_mode` has it."""
    if mode == "binary_mask":
        return list(masks.to_dense())
    size = list(masks.size)
    if mode == "coco_rle":
        return [{"size": size, "counts": counts.decode()} for counts in masks.to_coco()]
    bounds = np.split(masks.bounds, masks.starts[1:-1]) if len(masks) else []
    return [
        {"size": size, "counts": np.diff(each, prepend=0, append=size[0] * size[1]).tolist()}
        for each in bounds
    ]


def _boxes(masks: RLEMasks) -> Int64[np.ndarray, "n 4"]:
    """Returns boxes with inclusive ends; that of an empty mask is 0 0 0 0, as the reference code's."""
    return masks.boxes().astype(np.int64).clip(0)


def _repeated(crop: Box, count: int) -> Int64[np.ndarray, "n 4"]:
    return np.tile(np.array(crop, np.int64), (count, 1))


def _xywh(box: Int64[np.ndarray, "4"]) -> list[int]:
    x0, y0, x1, y1 = box.tolist()
    return [x0, y0, x1 - x0, y1 - y0]
