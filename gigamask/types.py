"""The records that pass through the doors, from one image's annotation to the sums a step divides.

Letters in shapes: B images in a batch, M masks in a batch (all images', flat), K masks an answer holds (1 or 3), N points of a prompt,
G side of the low-resolution mask grid (four times the embedding's), S side of the square input. Frames: "original" is the stored pixels,
"input" the S x S square the encoder sees, "truth" the grid that clicks and losses live on. `(H, W)` always. Points and boxes are `xy` and `xyxy`
in pixel-index coordinates (0 is the centre of the first pixel), and boxes have inclusive ends, as SA-1B's do.

Not here: the seams (`seams`), runs (`geometry.runs`), the transform between frames (`geometry.frame`).
"""

from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, UInt8
from torch import Tensor

from gigamask.masks.rle import RLEMasks, decode_rle
from gigamask.masks.transforms import ImageTransform


class SampleRef(NamedTuple):
    """One sample of the endless sequence: the image at `row` of the index, at `position` from the beginning of `epoch`.

    `mask` is the one mask it is trained on, counted among those that pass the filters, -1 where there may be several; `place` counts from the
    beginning of the global batch; `weight` is what its losses are multiplied by; `stratum` is the one its sampler drew it from, -1 where it has none.
    """

    epoch: int
    position: int
    row: int
    mask: int = -1
    batch_index: int = 0
    weight: float = 1.0
    stratum: int = -1


@dataclass(frozen=True)
class StepPlan:
    """What one rank visits in one step, in micro-batches; `start` and `samples` count the global samples consumed before and after the step."""

    micro_batches: tuple[tuple[SampleRef, ...], ...]
    start: int
    samples: int


@dataclass(frozen=True)
class ImageAnnotation:
    """One annotated image as its json says: masks on the original grid, checked."""

    name: str
    size: tuple[int, int]
    masks: RLEMasks
    predicted_iou: Float32[np.ndarray, "n"]
    stability_score: Float32[np.ndarray, "n"]


@dataclass(frozen=True)
class RandomSpec:
    """How many random numbers each sample carries: `clicks` per mask, `blocks` of the encoder for drop path, `patches` of the image for masked
    pre-training, `points` per mask for a loss at points, 0 or 1, and the `seed` that names them."""

    seed: int
    clicks: int
    blocks: int
    patches: int = 0
    points: int = 0


@dataclass(frozen=True)
class RandomInputs:
    """Uniform and normal numbers drawn when a sample is assembled and spent on the device.

    `first` in [0, 1) chooses a mask's first prompt; `clicks` in [0, 1) chooses (row, then column) for each click, and the last
    one the place of a loss's points where it has such; `box_noise` is standard
    normal, one number for each side; `drop_path` in [0, 1) chooses the residual branches (attention, MLP) an image skips; `patches` in [0, 1) ranks
    an image's patches, row by row, for masked pre-training, which hides the last ones.
    """

    first: Float[Tensor, "M"]
    clicks: Float[Tensor, "M R 2"]
    box_noise: Float[Tensor, "M 4"]
    drop_path: Float[Tensor, "B L 2"]
    patches: Float[Tensor, "B P"] = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass(frozen=True)
class Sample:
    """One image ready to be batched: uint8 pixels fitted to the input square, masks as runs of the G x G grid, their boxes and strata, its chance.

    A mask's stratum is that of the visit, or else its granularity in the stored image: 0 fine, 1 medium, 2 coarse.
    """

    name: str
    ref: SampleRef
    image: UInt8[Tensor, "3 h w"]
    transform: ImageTransform
    masks: RLEMasks
    boxes_input: Float32[np.ndarray, "m 4"]
    strata: Int64[np.ndarray, "m"]
    random_inputs: RandomInputs


@dataclass(frozen=True)
class DataCursor:
    """Where training stands in the endless sequence of samples: how many were consumed. This is the loader's whole state."""

    samples: int = 0


@dataclass(frozen=True)
class SkippedSample:
    """A sample that was left out, and why."""

    name: str
    reason: str


@runtime_checkable
class BatchProtocol(Protocol):
    """What one rank trains on in one step, or a micro-batch of it, whatever it holds for its task.

    Of each sample: its name, its place in the global batch, what its losses are multiplied by. Of each thing that has a loss of its own and may be
    mined, on one flat axis: the sample it is of, ascending, and its stratum. `cursor` is where training stands once it has been trained on.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def batch_index(self) -> Int64[Tensor, "B"]: ...
    @property
    def weights(self) -> Float[Tensor, "B"]: ...
    @property
    def mask_image(self) -> Int64[Tensor, "M"]: ...
    @property
    def strata(self) -> Int64[Tensor, "M"]: ...
    @property
    def cursor(self) -> DataCursor: ...
    @property
    def rejected(self) -> tuple[SkippedSample, ...]: ...

    def to(self, device: torch.device | str) -> "BatchProtocol":
        """Moves every tensor to `device`."""
        ...

    def select(self, kept: Int64[Tensor, "K"]) -> "BatchProtocol":
        """Returns the same samples with these of the things that have a loss alone, given in ascending order."""
        ...


@dataclass(frozen=True)
class Batch:
    """Images of one step of one rank (or a micro-batch of it), with all their masks on one flat axis.

    `places` tells where in the global batch each image is, `weights` what its losses are multiplied by, `mask_image` each mask's image, ascending,
    `strata` the stratum that mining holds each mask against.
    `pause` in [0, 1) chooses the round without a new point; it belongs to the global step, so all ranks and micro-batches share it.
    `cursor` is where training stands once this batch has been trained on.
    """

    names: tuple[str, ...]
    images: UInt8[Tensor, "B 3 S S"]
    input_sizes: Int64[Tensor, "B 2"]
    batch_index: Int64[Tensor, "B"]
    weights: Float[Tensor, "B"]
    mask_image: Int64[Tensor, "M"]
    strata: Int64[Tensor, "M"]
    boxes_input: Float[Tensor, "M 4"]
    rle_bounds: Int[Tensor, "T"]
    rle_offsets: Int64[Tensor, "M1"]
    mask_size: int
    random_inputs: RandomInputs
    mask_only_round_u: float
    cursor: DataCursor
    rejected: tuple[SkippedSample, ...] = ()

    def to(self, device: torch.device | str) -> "Batch":
        """Moves every tensor to `device` but `mask_starts`, which says where to cut and so stays where it can be read without waiting."""
        return replace(
            _each_tensor(self, lambda tensor: tensor.to(device, non_blocking=True)),
            rle_offsets=self.rle_offsets,
        )

    def pin_memory(self) -> "Batch":
        """Pins every tensor; torch's loader calls this."""
        return _each_tensor(self, lambda tensor: tensor.pin_memory())

    def dense(self, start: int, stop: int) -> Bool[Tensor, "m G G"]:
        """Returns masks `start` to `stop` as pixels of the G x G grid, on the batch's device."""
        starts = self.rle_offsets[start : stop + 1]
        bounds = self.rle_bounds[int(starts[0]) : int(starts[-1])]
        return decode_rle(
            bounds,
            (starts - starts[0]).to(bounds.device, non_blocking=True),
            (self.mask_size, self.mask_size),
        )

    def select(self, kept: Int64[Tensor, "K"]) -> "Batch":
        """Returns the batch with these masks alone, given in ascending order; images stay, also those without a mask then."""
        there = kept.cpu()
        lengths, firsts = self.rle_offsets.diff()[there], self.rle_offsets[:-1][there]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        places = torch.repeat_interleave(firsts - starts[:-1], lengths) + torch.arange(
            int(starts[-1])
        )
        chance = {
            name: getattr(self.random_inputs, name)[kept]
            for name in ("first", "clicks", "box_noise")
        }
        return replace(
            self,
            mask_image=self.mask_image[kept],
            strata=self.strata[kept],
            boxes_input=self.boxes_input[kept],
            rle_bounds=self.rle_bounds[places.to(self.rle_bounds.device)],
            rle_offsets=starts,
            random_inputs=replace(self.random_inputs, **chance),
        )

    def padded(self) -> "PaddedBatch":
        """Returns masks and boxes on an axis for each image instead of the flat one; an image of few masks takes the room of one of many."""
        edges = torch.searchsorted(
            self.mask_image, torch.arange(len(self.images) + 1, device=self.mask_image.device)
        )
        counts = edges.diff()
        shape = (len(self.images), int(counts.max()) if len(counts) else 0)
        place = torch.arange(len(self.mask_image), device=edges.device) - edges[self.mask_image]
        masks = torch.zeros(
            *shape, self.mask_size, self.mask_size, dtype=torch.bool, device=self.images.device
        )
        boxes = torch.zeros(*shape, 4, dtype=self.boxes_input.dtype, device=self.images.device)
        masks[self.mask_image, place] = self.dense(0, len(self.mask_image))
        boxes[self.mask_image, place] = self.boxes_input
        return PaddedBatch(self.images, self.input_sizes, counts, masks, boxes)


@dataclass(frozen=True)
class PaddedBatch:
    """A batch in the form that knows no ragged axis: of image b's N masks and boxes the first `mask_counts[b]` are real, the others are zero."""

    images: UInt8[Tensor, "B 3 S S"]
    input_sizes: Int64[Tensor, "B 2"]
    mask_counts: Int64[Tensor, "B"]
    masks: Bool[Tensor, "B N G G"]
    boxes_input: Float[Tensor, "B N 4"]


def _each_tensor(record, function):
    """Returns the record with `function` applied to each tensor in it, also in the records it holds."""
    changes = {}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Tensor):
            changes[each.name] = function(value)
        elif isinstance(value, RandomInputs):
            changes[each.name] = _each_tensor(value, function)
    return replace(record, **changes)


@dataclass(frozen=True)
class Targets:
    """What the rounds are held against: masks on the truth grid and how that grid lies in the input square.

    `masks` is bool, or the covered share of each cell in [0, 1] when targets are area-averaged; a cell is foreground above one half.
    `valid` is False on padding. `cell_xy` is the width and height of one cell in input pixels. `shift` in [0, 1) moves the points of a loss that
    looks at some points only. `low_side` is G, the side of the mask prompts' grid over the same square; None where it is the truth's own.
    """

    masks: Bool[Tensor, "M H W"] | Float[Tensor, "M H W"]
    valid: Bool[Tensor, "M H W"]
    boxes_input: Float[Tensor, "M 4"]
    cell_xy: tuple[float, float]
    shift: Float[Tensor, "M 2"] | None = None
    mask_prompt_size: int | None = None

    @property
    def foreground(self) -> Bool[Tensor, "M H W"]:
        return self.masks if self.masks.dtype == torch.bool else self.masks > 0.5


@dataclass(frozen=True)
class Prompts:
    """What one round is asked: the same number of point tokens for every mask.

    Labels: 1 foreground, 0 background, -1 no point (padding, which the model attends to as SAM's does), 2 and 3 the top-left and bottom-right
    corner of a box. `masks` are the logits fed back from an earlier round, or None; `masked` says which masks have such, None where all do.
    `several` asks for three masks instead of one. `present` is False for tokens that a mask has not, where others have more: nothing attends to
    them; None where each has all.
    """

    points_xy_input: Float[Tensor, "M N 2"]
    labels: Int64[Tensor, "M N"]
    masks: Float[Tensor, "M G G"] | None
    multimask_output: bool
    has_mask_prompt: Bool[Tensor, "M"] | None = None
    token_mask: Bool[Tensor, "M N"] | None = None


@dataclass(frozen=True)
class Prediction:
    """The model's answer to one round: mask logits on the truth grid, predicted IoU, and the G x G logits that a later round is fed."""

    logits: Float[Tensor, "M K H W"]
    iou_predictions: Float[Tensor, "M K"]
    low_res_logits: Float[Tensor, "M K G G"]


@dataclass(frozen=True)
class PromptRound:
    """One question and its answer; `index` counts from 0. `chosen` is the answer of the highest predicted IoU, the one that goes on."""

    index: int
    prompts: Prompts
    prediction: Prediction

    @property
    def best_index(self) -> Int64[Tensor, "M"]:
        return self.prediction.iou_predictions.detach().argmax(1)

    @property
    def pred_mask(self) -> Bool[Tensor, "M H W"]:
        """The chosen mask, thresholded at a logit of 0."""
        return _pick(self.prediction.logits.detach(), self.best_index) > 0

    @property
    def mask_input(self) -> Float[Tensor, "M G G"]:
        """The chosen mask's logits, cut from the graph: what the next round is fed."""
        return _pick(self.prediction.low_res_logits.detach(), self.best_index)


def _pick(stack: Float[Tensor, "M K h w"], index: Int64[Tensor, "M"]) -> Float[Tensor, "M h w"]:
    if stack.shape[1] == 1:
        return stack[:, 0]
    return stack[torch.arange(len(stack), device=stack.device), index]


@dataclass(frozen=True)
class LossSums:
    """Sums and counts of one piece of the loss; only the step divides.

    `loss` is the differentiable sum over masks; `count` how many masks it sums; `parts` sums by name for the log, each over `count`;
    `by_mask` each mask's own loss, which an objective leaves in the graph so that a task can weight it; they are the batch's masks from `first` on.
    `image` is each one's image in the batch, which the task enters. Where a task has no masks, each image counts as one.
    """

    loss: Float[Tensor, ""]
    count: Float[Tensor, ""]
    parts: dict[str, Float[Tensor, ""]]
    per_mask: Float[Tensor, "M"]
    first: int = 0
    image: Int64[Tensor, "M"] | None = None
