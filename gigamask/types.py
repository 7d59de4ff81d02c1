"""Data classes passed between packages, from an image's annotation to the loss sums of a step.

Letters in shapes: B images of a batch; M masks of a batch (all images on one axis); K masks of an
output (1 or 3); N points of a prompt; G side of the low-resolution masks (four times the
embedding's); S side of the square model input. There are three coordinate frames: "original", the
stored pixels; "input", the S x S square that the encoder sees; and the target grid, on which clicks
and losses are computed. Sizes are `(H, W)`. Points `xy` and boxes `xyxy` are pixel indices, so 0 is
the center of the first pixel, and boxes have inclusive ends, as in SA-1B.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, UInt8
from torch import Tensor

from gigamask.masks.devices import constant, decode_rle
from gigamask.masks.rle import RLEMasks
from gigamask.masks.transforms import ImageTransform, above
from gigamask.records import DataCursor, SampleRef, SkippedSample

Masks = Bool[Tensor, "M H W"]
ImageEmbedding = Float[Tensor, "B C E E"]
Scalar = Float[Tensor, ""]
PerMask = Int64[Tensor, "M"]
"""One integer for each mask."""
OUTSIDE_LOGIT = -4.0
"""Mask logit outside of the window in which a model answers."""


@dataclass(frozen=True)
class RandomSpec:
    """How many random numbers each sample carries.

    Attributes:
        seed: Random seed of the run.
        clicks: Number of pairs per mask for clicks.
        blocks: Number of encoder blocks with drop path.
        patches: Number of image patches for MAE pre-training.
        points: Number of pairs per mask for a point loss, 0 or 1.
        drop_path_mode: "sample", "balanced" or "batch": `SamTrainConfig.drop_path_mode`.
        drop_path_rate: Drop path rate of the last block, increasing linearly from 0.
    """

    seed: int
    clicks: int
    blocks: int
    patches: int = 0
    points: int = 0
    drop_path_mode: str = "sample"
    drop_path_rate: float = 0.0

    def draw_drop_path(self, generator: np.random.Generator) -> Float32[np.ndarray, "1 L 2"]:
        """Draw what decides which branches an image, or all images of a step, skip.

        Each number is uniform in [0, 1). Balanced ones are drawn by systematic sampling (Madow
        1949), separately for attention and MLPs: of each, as many are below the rates of their
        blocks as the sum of the rates, rounded down or up.
        """
        uniforms = generator.random((1, self.blocks, 2), dtype=np.float32)
        if self.drop_path_mode == "balanced":
            rates = np.linspace(0, self.drop_path_rate, self.blocks)
            for branch in range(2):
                order = generator.permutation(self.blocks)
                starts = np.cumsum(rates[order]) - rates[order]
                uniforms[0, order, branch] = (uniforms[0, :1, branch] - starts) % 1
        return uniforms


@dataclass(frozen=True)
class RandomInputs:
    """Random numbers drawn with the sample and used on the device.

    Attributes:
        first_prompt: Uniform in [0, 1); chooses the kind of a mask's first prompt.
        clicks: Uniform in [0, 1); row, then column of each click. With a point loss, the last pair
            shifts its points.
        box_noise: Standard normal; noise for each side of a box.
        drop_path: Uniform in [0, 1); decides which residual branches (attention, MLP) of each block
            an image skips. Always on the CPU, so that reading it does not wait for a GPU.
        patches: Uniform in [0, 1); ranks an image's patches, in row-major order. MAE pre-training
            masks those ranked last.
    """

    first_prompt: Float[Tensor, "M"]
    clicks: Float[Tensor, "M R 2"]
    box_noise: Float[Tensor, "M 4"]
    drop_path: Float[Tensor, "B L 2"]
    patches: Float[Tensor, "B P"] = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass(frozen=True)
class Sample:
    """One image, ready to be batched.

    Attributes:
        name: Name of the tar and the image.
        ref: Position in the sequence of samples.
        image: Pixels resized for the model input, without padding.
        transform: Transform from the stored image to the model input.
        masks: Masks on the G x G grid.
        boxes_input: Boxes of the masks, xyxy in input pixels.
        strata: Stratum of each mask: the sampler's, or else the mask's granularity in the stored
            image (0 fine, 1 medium, 2 coarse).
        random_inputs: Random numbers of the image and its masks.
        classes: Class of each mask, -1 for none; None if the model has no classes.
    """

    name: str
    ref: SampleRef
    image: UInt8[Tensor, "channels h w"]
    transform: ImageTransform
    masks: RLEMasks
    boxes_input: Float32[np.ndarray, "m 4"]
    strata: Int64[np.ndarray, "m"]
    random_inputs: RandomInputs
    classes: Int64[np.ndarray, "m"] | None = None


@runtime_checkable
class BatchProtocol(Protocol):
    """Interface of a batch of one rank, or of a micro-batch, for any task.

    Each of the B samples has a name, a position in the global batch (`batch_index`) and a loss
    weight. Each of the M objects with its own loss, such as a mask, has the index of its sample
    (`mask_image`, ascending) and a stratum for hard example mining. `cursor` is the state of the
    loader after training on the batch.
    """

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def batch_index(self) -> Int64[Tensor, "B"]: ...
    @property
    def weights(self) -> Float[Tensor, "B"]: ...
    @property
    def mask_image(self) -> PerMask: ...
    @property
    def strata(self) -> PerMask: ...
    @property
    def cursor(self) -> DataCursor: ...
    @property
    def skipped(self) -> tuple[SkippedSample, ...]: ...

    def to(self, device: torch.device | str) -> "BatchProtocol":
        """Return the batch with all tensors on `device`."""
        ...

    def select(self, indices: Int64[Tensor, "K"]) -> "BatchProtocol":
        """Return the batch with only the objects at `indices`, in ascending order."""
        ...


@dataclass(frozen=True)
class Batch:
    """Images of one rank in one step, or of a micro-batch, with their masks on one flat axis.

    Attributes:
        names: Name of the tar and the image of each sample.
        images: Pixels, 0 in the padding.
        input_sizes: Height and width of each image without padding, at the top left.
        scale_xy: Input pixels per pixel of the stored image, in x and y.
        batch_index: Position of each image in the global batch.
        weights: Weight of each image's losses.
        mask_image: Index of each mask's image, ascending.
        strata: Stratum of each mask, for hard example mining.
        boxes_input: Boxes of the masks, xyxy in input pixels.
        rle_bounds: Change points of all masks; see `RLEMasks`.
        rle_offsets: Start of each mask's change points, followed by the end of the last; always on
            the CPU.
        mask_size: Side G of the masks' grid.
        random_inputs: Random numbers of the images and masks.
        mask_only_round_u: Uniform in [0, 1); selects the mask-only round. All ranks and
            micro-batches of a step share it.
        cursor: State of the loader after training on this batch.
        skipped: Samples that were skipped.
        classes: Class of each mask, -1 for none; None if the model has no classes.
    """

    names: tuple[str, ...]
    images: UInt8[Tensor, "B channels S S"]
    input_sizes: Int64[Tensor, "B 2"]
    scale_xy: Float[Tensor, "B 2"]
    batch_index: Int64[Tensor, "B"]
    weights: Float[Tensor, "B"]
    mask_image: PerMask
    strata: PerMask
    boxes_input: Float[Tensor, "M 4"]
    rle_bounds: Int[Tensor, "T"]
    rle_offsets: Int64[Tensor, "M1"]
    mask_size: int
    random_inputs: RandomInputs
    mask_only_round_u: float
    cursor: DataCursor
    skipped: tuple[SkippedSample, ...] = ()
    classes: PerMask | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`, except what the CPU reads: `rle_offsets`, `drop_path`."""
        # On the CPU, values would be read before they arrive.
        batch = map_tensors(
            lambda tensor: tensor.to(device, non_blocking=torch.device(device).type != "cpu"), self
        )
        random_inputs = replace(batch.random_inputs, drop_path=self.random_inputs.drop_path)
        return replace(batch, rle_offsets=self.rle_offsets, random_inputs=random_inputs)

    def pin_memory(self) -> "Batch":
        """Return the batch in pinned memory; torch's `DataLoader` calls this."""
        return map_tensors(lambda tensor: tensor.pin_memory(), self)

    def dense(self, start: int, stop: int) -> Bool[Tensor, "m G G"]:
        """Decode masks on the batch's device.

        Args:
            start: First mask.
            stop: One past the last mask.

        Returns:
            The masks on the G x G grid.
        """
        offsets = self.rle_offsets[start : stop + 1]
        bounds = self.rle_bounds[int(offsets[0]) : int(offsets[-1])]
        return decode_rle(
            bounds,
            (offsets - offsets[0]).to(bounds.device, non_blocking=True),
            (self.mask_size, self.mask_size),
        )

    def select(self, indices: Int64[Tensor, "K"]) -> "Batch":
        """Return the batch with only the masks at `indices`, in ascending order.

        All images are kept, even those left without masks.
        """
        indices_cpu = indices.cpu()
        lengths, firsts = self.rle_offsets.diff()[indices_cpu], self.rle_offsets[:-1][indices_cpu]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        gather = torch.repeat_interleave(firsts - offsets[:-1], lengths) + torch.arange(
            int(offsets[-1])
        )
        per_mask = {
            name: getattr(self.random_inputs, name)[indices]
            for name in ("first_prompt", "clicks", "box_noise")
        }
        return replace(
            self,
            mask_image=self.mask_image[indices],
            strata=self.strata[indices],
            boxes_input=self.boxes_input[indices],
            rle_bounds=self.rle_bounds[gather.to(self.rle_bounds.device)],
            rle_offsets=offsets,
            random_inputs=replace(self.random_inputs, **per_mask),
            classes=None if self.classes is None else self.classes[indices],
        )

    def padded(self) -> "PaddedBatch":
        """Return the batch with masks padded per image instead of on one flat axis."""
        edges = torch.searchsorted(
            self.mask_image, torch.arange(len(self.images) + 1, device=self.mask_image.device)
        )
        counts = edges.diff()
        shape = (len(self.images), int(counts.max()) if len(counts) else 0)
        column = torch.arange(len(self.mask_image), device=edges.device) - edges[self.mask_image]
        masks = torch.zeros(
            *shape, self.mask_size, self.mask_size, dtype=torch.bool, device=self.images.device
        )
        boxes = torch.zeros(*shape, 4, dtype=self.boxes_input.dtype, device=self.images.device)
        masks[self.mask_image, column] = self.dense(0, len(self.mask_image))
        boxes[self.mask_image, column] = self.boxes_input
        classes = None
        if self.classes is not None:
            classes = torch.full(shape, -1, device=self.images.device)
            classes[self.mask_image, column] = self.classes
        return PaddedBatch(self.images, self.input_sizes, counts, masks, boxes, classes)


@dataclass(frozen=True)
class PaddedBatch:
    """A batch with masks zero-padded per image; image b has `mask_counts[b]` masks.

    `classes` are padded with -1; None if the model has no classes.
    """

    images: UInt8[Tensor, "B channels S S"]
    input_sizes: Int64[Tensor, "B 2"]
    mask_counts: Int64[Tensor, "B"]
    masks: Bool[Tensor, "B N G G"]
    boxes_input: Float[Tensor, "B N 4"]
    classes: Int64[Tensor, "B N"] | None = None


_Record = TypeVar(
    "_Record", bound="Batch | RandomInputs | Targets | Prompts | WindowLogits | Prediction"
)


def map_tensors(function: Callable[..., Tensor], *records: _Record) -> _Record:
    """Return the first record with `function` of each tensor, and of those of the other records.

    Records in the records are treated alike.
    """
    changes: dict[str, Any] = {}
    for item in fields(records[0]):
        values = [getattr(record, item.name) for record in records]
        if isinstance(values[0], Tensor):
            changes[item.name] = function(*values)
        elif isinstance(values[0], RandomInputs | WindowLogits):
            changes[item.name] = map_tensors(function, *values)
    return replace(records[0], **changes)


class cached_tensor:  # noqa: N801  (a decorator, like `functools.cached_property`)
    """Property that is computed once, but by a compiler, which merges equal operations, each time.

    Args:
        function: Computes the value.
    """

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        self._function, self._name = function, f"_{function.__name__}"
        self.__doc__ = function.__doc__

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        if torch.compiler.is_compiling():
            return self._function(owner)
        if self._name not in owner.__dict__:
            owner.__dict__[self._name] = self._function(owner)
        return owner.__dict__[self._name]


@dataclass(frozen=True)
class Targets:
    """Ground truth of the masks of a round.

    Attributes:
        masks: Masks on the target grid: bool; or, for area-averaged targets, the covered share of
            each cell in [0, 1], where a cell above one half is foreground, or the one with the
            largest share.
        valid: False in the padding.
        boxes_input: Boxes, xyxy in input pixels.
        cell_xy: Width and height of one cell in input pixels.
        scale_xy: Input pixels per pixel of the stored image, in x and y.
        shift: Uniform in [0, 1); shifts the points of a point loss.
        mask_prompt_size: Side G of mask prompts, which cover the same square; None: that of the
            targets.
        counted: False for copies that only fill up the number of masks, as --compile requires: no
            sum counts them; None: all masks count.
        classes: Class of each mask, -1 for none; None if the model has no classes.
        extent_xy: Width and height of the image without padding, in input pixels; None: of the
            whole grid.
    """

    masks: Masks | Float[Tensor, "M H W"]
    valid: Masks
    boxes_input: Float[Tensor, "M 4"]
    cell_xy: tuple[float, float]
    scale_xy: Float[Tensor, "M 2"]
    shift: Float[Tensor, "M 2"] | None = None
    mask_prompt_size: int | None = None
    counted: Bool[Tensor, "M"] | None = None
    classes: PerMask | None = None
    extent_xy: Float[Tensor, "M 2"] | None = None

    @cached_tensor
    def extent(self) -> Float[Tensor, "M 2"]:
        """Width and height of the image without padding, in input pixels."""
        if self.extent_xy is not None:
            return self.extent_xy.to(self.scale_xy)
        height, width = self.valid.shape[1:]
        whole = width * self.cell_xy[0], height * self.cell_xy[1]
        return constant(whole, self.scale_xy.device, self.scale_xy.dtype).expand_as(self.scale_xy)

    @cached_tensor
    def count(self) -> Scalar:
        """Number of masks that count."""
        if self.counted is None:
            return torch.full((), float(len(self.masks)), device=self.masks.device)
        return self.counted.sum().float()

    def total(self, values: Float[Tensor, "*parts M"]) -> Float[Tensor, "*parts"]:
        """Return sums over the masks that count.

        Args:
            values: Values of each mask.
        """
        return (values if self.counted is None else torch.where(self.counted, values, 0)).sum(-1)

    def select(self, index: Int64[Tensor, "R"]) -> "Targets":
        """Return the targets of some masks.

        Args:
            index: Which ones.
        """
        return map_tensors(lambda each: each[index], self)

    def filled(self, count: int) -> "Targets":
        """Return `count` masks: these, then copies of the last one that do not count.

        Args:
            count: At least the number of masks.
        """
        row = torch.arange(count, device=self.masks.device)
        index = row.clamp(max=len(self.masks) - 1)
        return replace(self.select(index), counted=row < len(self.masks))

    @cached_tensor
    def foreground(self) -> Masks:
        """The masks as bool; where no cell is above one half, those with the largest share."""
        if self.masks.dtype == torch.bool:
            return self.masks.contiguous()
        shares = self.fractions
        most = shares.amax((1, 2), keepdim=True)
        return (shares > 0.5) | ((shares == most) & (most > 0) & (most <= 0.5))

    @cached_tensor
    def fractions(self) -> Float[Tensor, "M H W"]:
        """The masks in at least float32, 0 in the padding."""
        wide = torch.promote_types(self.masks.dtype, torch.float32)
        return self.masks.to(wide).masked_fill(~self.valid, 0)

    @cached_tensor
    def clickable(self) -> Masks:
        """The masks without padding; where a mask is empty, all that is no padding."""
        inside = self.foreground & self.valid
        return torch.where(inside.any((1, 2), keepdim=True), inside, self.valid)


@dataclass(frozen=True)
class Prompts:
    """The prompts of one round, with the same number of point tokens for every mask.

    Attributes:
        points_xy_input: Points, xy in input pixels.
        labels: 1 foreground, 0 background, 2 and 3 the top-left and bottom-right corner of a box,
            -1 no point (padding that the model attends to, as in SAM).
        masks: Logits of an earlier round; None: no mask prompts.
        multimask_output: Whether to predict three masks instead of one.
        has_mask_prompt: Which masks have a mask prompt; None: all, if `masks` is not None.
        token_mask: False for tokens that only pad a shorter prompt, which nothing attends to; None:
            no padding.
        closer: Whether to average the mask prompts with answers in closer windows, of models that
            answer in windows.
    """

    points_xy_input: Float[Tensor, "M N 2"]
    labels: Int64[Tensor, "M N"]
    masks: Float[Tensor, "M G G"] | None
    multimask_output: bool
    has_mask_prompt: Bool[Tensor, "M"] | None = None
    token_mask: Bool[Tensor, "M N"] | None = None
    closer: bool = False

    @property
    def has_box(self) -> Bool[Tensor, "M"]:
        """Which masks have a box."""
        is_corner = self.labels == 2
        return (is_corner if self.token_mask is None else is_corner & self.token_mask).any(1)

    def to(self, device: torch.device) -> "Prompts":
        """Return the prompts on `device`; Apple's GPUs lack float64."""
        narrow = {torch.float64: torch.float32} if device.type == "mps" else {}
        return map_tensors(lambda each: each.to(device, narrow.get(each.dtype)), self)

    def select(self, index: Int64[Tensor, "R"]) -> "Prompts":
        """Return the prompts of some masks.

        Args:
            index: Which ones.
        """
        return map_tensors(lambda each: each[index], self)


@dataclass(frozen=True)
class WindowLogits:
    """Mask logits in windows of the model input, for models that answer around the prompt.

    Attributes:
        logits: n x n samples in each window.
        windows: Edges x0 y0 x1 y1 of the windows: input pixel x covers [x, x + 1].
    """

    logits: Float[Tensor, "M K n n"]
    windows: Float[Tensor, "M K 4"]

    def select(self, index: PerMask) -> "WindowLogits":
        """Return one window of each prompt."""
        at = torch.arange(index.shape[0], device=index.device), index
        return WindowLogits(self.logits[at][:, None], self.windows[at][:, None])

    def paste(self, side: int, image_size: int) -> Float[Tensor, "M K G G"]:
        """Return the logits on a grid of the whole model input.

        Args:
            side: Side of the grid, G.
            image_size: Side of the model input in pixels.
        """
        from gigamask.masks.windows import paste

        dtype = torch.promote_types(self.logits.dtype, torch.float32)
        flat, windows = (each.flatten(0, 1).to(dtype) for each in (self.logits, self.windows))
        pasted = paste(flat, windows * (side / image_size), side, OUTSIDE_LOGIT)
        return pasted.unflatten(0, (-1, self.logits.shape[1]))


class MaskDecoderOutput(NamedTuple):
    """What a mask decoder predicts for M prompts.

    Attributes:
        masks: Logits of K masks for each prompt, on the G x G grid or in windows.
        iou_predictions: Predicted IoU of each mask.
        class_logits: Logits of the C classes of each mask; None if the model has no classes.
        object_score: Logit of the presence of an object, in SAM 2.
    """

    masks: Float[Tensor, "M K G G"] | WindowLogits
    iou_predictions: Float[Tensor, "M K"]
    class_logits: Float[Tensor, "M K C"] | None = None
    object_score: Float[Tensor, "M"] | None = None

    @property
    def windows(self) -> WindowLogits | None:
        """The masks, if they are in windows."""
        return self.masks if isinstance(self.masks, WindowLogits) else None

    def low_res_logits(self, mask_size: int, image_size: int) -> Float[Tensor, "M K G G"]:
        """Return the masks on the G x G grid.

        Args:
            mask_size: Side of the grid, G.
            image_size: Side of the model input in pixels.
        """
        if self.windows is None:
            return cast(Tensor, self.masks)
        return self.windows.paste(mask_size, image_size)

    def select(self, index: PerMask) -> "MaskDecoderOutput":
        """Return one mask of each prompt.

        Args:
            index: Which one.
        """
        masks, iou, classes = self.masks, self.iou_predictions, self.class_logits
        at = torch.arange(index.shape[0], device=index.device), index
        return MaskDecoderOutput(
            self.windows.select(index) if self.windows else cast(Tensor, masks)[at][:, None],
            iou.gather(1, index[:, None]),
            None if classes is None else classes[at][:, None],
            self.object_score,
        )


@dataclass(frozen=True)
class Prediction:
    """The output of one round.

    Attributes:
        logits: Mask logits on the target grid.
        iou_predictions: Predicted IoU of each mask.
        low_res_logits: Mask logits on the G x G grid, usable as mask prompts of a later round.
        in_window: The same logits as the model predicted them, if it answers in windows.
        class_logits: Logits of the C classes of each mask; None if the model has no classes.
    """

    logits: Float[Tensor, "M K H W"]
    iou_predictions: Float[Tensor, "M K"]
    low_res_logits: Float[Tensor, "M K G G"]
    in_window: WindowLogits | None = None
    class_logits: Float[Tensor, "M K C"] | None = None

    def regrouped(self, count: int) -> "Prediction":
        """Return the single masks of successive prompts as the masks of one prompt.

        Args:
            count: Number of masks of a prompt.
        """
        return map_tensors(lambda each: each.reshape(-1, count, *each.shape[2:]), self)

    def better(self, other: "Prediction", averaged: Bool[Tensor, "M"]) -> "Prediction":
        """Return each mask, or that of `other` where its predicted IoU is higher; on the grid.

        Args:
            other: Other masks for the same prompts.
            averaged: Prompts whose logits become the means of both, without a choice.
        """
        chosen = (other.iou_predictions > self.iou_predictions) & ~averaged[:, None]
        found = map_tensors(
            lambda one, two: torch.where(chosen[(..., *[None] * (one.ndim - 2))], two, one),
            *(replace(each, in_window=None) for each in (self, other)),
        )
        mean = averaged[:, None, None, None]
        logits = torch.where(mean, (self.logits + other.logits) / 2, found.logits)
        low = (self.low_res_logits + other.low_res_logits) / 2
        low = torch.where(mean, low, found.low_res_logits)
        return replace(found, logits=logits, low_res_logits=low)


@dataclass(frozen=True)
class PromptRound:
    """Prompts and prediction of one round; `index` counts rounds from 0."""

    index: int
    prompts: Prompts
    prediction: Prediction

    @cached_tensor
    def best_index(self) -> PerMask:
        """Index of the predicted mask with the highest predicted IoU."""
        return self.prediction.iou_predictions.detach().argmax(1)

    @property
    def pred_mask(self) -> Masks:
        """The mask at `best_index`, thresholded at a logit of 0."""
        return above(self._select(self.prediction.logits.detach()), 0.0)

    @property
    def mask_input(self) -> Float[Tensor, "M G G"]:
        """Low-resolution logits at `best_index`, detached: the mask prompt of the next round."""
        return self._select(self.prediction.low_res_logits.detach())

    def _select(self, masks: Float[Tensor, "M K h w"]) -> Float[Tensor, "M h w"]:
        if masks.shape[1] == 1:
            return masks[:, 0]
        return masks[torch.arange(len(masks), device=masks.device), self.best_index]


@dataclass(frozen=True)
class LossSums:
    """Sums and counts of one chunk of the loss; only the training step divides.

    Attributes:
        loss: Differentiable sum over masks.
        count: Number of masks in the sum; a task without masks counts images.
        parts: Sums to log by name, each to be divided by `count`.
        per_mask: Loss of each mask, starting with the batch's mask `first`. A `Loss` leaves it
            attached to the graph so that a task can weight it.
        first: Index of the first mask in the batch.
        image: Index of each mask's image in the batch; set by the task.
        part_counts: Counts of parts that only some masks have, by which they are divided instead.
    """

    loss: Scalar
    count: Scalar
    parts: dict[str, Scalar]
    per_mask: Float[Tensor, "M"]
    first: int = 0
    image: PerMask | None = None
    part_counts: dict[str, Scalar] = field(default_factory=dict)
