"""Prompts as windows and as maps: where to look, and what the prompt says about each sample.

Positions are edges: the center of input pixel x lies at x + 0.5, and a window is a box of edges.
Positions in a window are fractions of its width and height.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from gigamask.masks.devices import constant
from gigamask.masks.windows import coverage, sample_per_window, sampling_matrices
from gigamask.models.configs import WindowDecoder
from gigamask.types import ImageEmbedding, Prompts

MIN_ASPECT, MIN_SIDE = 0.35, 0.05
"""Smallest side of a window around a box or a mask, as fractions of its long side and the input."""
WindowMaps = Float[Tensor, "R n n"]
Points = Float[Tensor, "M 2"]
QUARTER = 0.6
"""Sides of four windows that cover another, as a fraction of its sides."""
GAUSSIANS = (0.05, 0.2)
"""Standard deviations of the maps of clicks, as fractions of the window."""
DISC = 0.22
"""Radius of the prior mask of a click, as a fraction of the window."""
PRIOR_RANGE, PRIOR_SLOPE = (-3.0, 1.5), 4.0
"""Logits of the prior far outside and inside of a box or disc, and its slope at the boundary."""
MAX_LOGIT = 3.0
"""Largest absolute logit of an earlier mask that becomes the prior."""
MAP_CHANNELS = 8
"""Maps of a prompt: clicks by label and width, box, ellipse, earlier mask, and whether there is
one."""
LIKENESS_CHANNELS = 12
"""Maps of `likeness`: to three kinds of prompts, in four groups of channels."""
PROPAGATIONS, AFFINITY = 2, 10.0
"""Steps of `propagated`, and the factor of the cosine of two samples in its softmax."""
MIDDLE_WINDOW = 1
"""The window of three that answers a mask prompt without `multimask_output`."""
BOX, CLICK, CORRECTION = 0, 1, 4
"""Kinds of answers: for a box, for a click in the first of three windows, and for a mask prompt."""


@dataclass(frozen=True)
class Clicks:
    """Clicks of M prompts, and what else they have.

    Attributes:
        points: Positions of the points.
        positive: Which points are foreground clicks.
        negative: Which points are background clicks.
        has_box: Which prompts have a box.
        has_mask: Which prompts have a mask prompt.
    """

    points: Float[Tensor, "M N 2"]
    positive: Bool[Tensor, "M N"]
    negative: Bool[Tensor, "M N"]
    has_box: Bool[Tensor, "M"]
    has_mask: Bool[Tensor, "M"]


@dataclass(frozen=True)
class PromptShapes(Clicks):
    """Clicks, boxes and earlier masks of M prompts, in input pixels.

    Attributes:
        box: Edges of the box; 0 without one.
    """

    box: Float[Tensor, "M 4"]

    @classmethod
    def from_prompts(cls, prompts: Prompts) -> "PromptShapes":
        """Return the shapes of prompts."""
        points, labels = prompts.points_xy_input + 0.5, prompts.labels
        if prompts.token_mask is not None:
            labels = labels.masked_fill(~prompts.token_mask, -1)
        corners = [
            torch.where((labels == corner)[..., None], points, 0).sum(1) for corner in (2, 3)
        ]
        has_mask = prompts.has_mask_prompt
        if has_mask is None:
            has_mask = torch.full_like(labels[:, :1].sum(1), prompts.masks is not None).bool()
        return cls(
            points, labels == 1, labels == 0, prompts.has_box, has_mask, torch.cat(corners, 1)
        )

    @property
    def kinds(self) -> Int64[Tensor, "M 3"]:
        """Kind of the answer in each of the three windows."""
        click = CLICK + torch.arange(3, device=self.points.device)
        kinds = torch.where(self.has_box[:, None], BOX, click)
        return torch.where(self.has_mask[:, None], CORRECTION, kinds)

    @property
    def corrects(self) -> Bool[Tensor, "M"]:
        """Which prompts have a mask prompt, and a click after another click or a box."""
        return self.has_mask & ((self.positive | self.negative).sum(1) + self.has_box > 1)

    def windows(
        self, masks: Float[Tensor, "M G G"] | None, config: WindowDecoder, side: int
    ) -> Float[Tensor, "M 3 4"]:
        """Return the edges of three windows for each prompt, from the smallest to the largest.

        Args:
            masks: Logits of mask prompts.
            config: Sizes of the windows.
            side: Side of the model input in pixels.
        """
        ratio = {
            name: constant(getattr(config, name), self.points.device)[:, None]
            for name in ("click_windows", "box_windows", "correction_windows")
        }
        first, last = _extent(self.points, self.positive | self.negative)
        has_positive = self.positive.any(1)[:, None]
        first_positive, last_positive = _extent(self.points, self.positive)
        first = torch.where(has_positive, first_positive, first)
        last = torch.where(has_positive, last_positive, last)
        is_empty = first[:, :1] > last[:, :1]  # no click, no box: the whole image
        first, last = torch.where(is_empty, 0, first), torch.where(is_empty, side, last)
        spread = (last - first).amax(1)[:, None, None] * ratio["correction_windows"][:1]
        sides = torch.maximum(ratio["click_windows"] * side, spread).expand(-1, 3, 2)
        sides = torch.where(is_empty[..., None], side, sides)
        around_clicks = _around(first, last, sides)

        box_first, box_last = self.box.unflatten(1, (2, 2)).unbind(1)
        box_sides = (box_last - box_first)[:, None] * ratio["box_windows"]
        around_box = _around(box_first, box_last, _widen(box_sides, side))
        windows = torch.where(self.has_box[:, None, None], around_box, around_clicks)
        if masks is None:
            return windows
        mask_first, mask_last = mask_extent(masks, side)
        is_empty = mask_first[:, :1] > mask_last[:, :1]
        mask_first = torch.minimum(mask_first, first_positive)
        mask_last = torch.maximum(mask_last, last_positive)
        mask_sides = (mask_last - mask_first)[:, None] * ratio["correction_windows"]
        around_mask = _around(mask_first, mask_last, _widen(mask_sides, side))
        use_mask = self.has_mask & ~is_empty[:, 0]
        return torch.where(use_mask[:, None, None], around_mask, windows)


def quarters(windows: Float[Tensor, "M 4"]) -> Float[Tensor, "M 4 4"]:
    """Return the edges of four windows that cover each window.

    Args:
        windows: Edges of the windows.
    """
    first, last = windows[:, None].chunk(2, 2)
    ends = torch.arange(2, device=windows.device)
    sides = QUARTER * (last - first)
    corners = torch.stack(torch.meshgrid(ends, ends, indexing="xy"), 2).flatten(0, 1)
    start = first + corners * (last - first - sides)
    return torch.cat([start, start + sides], 2)


def mask_extent(masks: Float[Tensor, "M G G"], side: int) -> tuple[Points, Points]:
    """Return the first and last edge of each mask, x and y; an empty mask's first exceed its last.

    Args:
        masks: Logits; above 0 is foreground.
        side: Side of the square that the masks cover.
    """
    cell = side / masks.shape[-1]
    first, last = [], []
    for axis in (1, 2):  # over rows: x, over columns: y
        any_foreground = (masks > 0).any(axis)
        index = torch.arange(masks.shape[-1], device=masks.device)
        first.append(torch.where(any_foreground, index, 2 * masks.shape[-1]).amin(1))
        last.append(torch.where(any_foreground, index + 1, -masks.shape[-1]).amax(1))
    return torch.stack(first, 1) * cell, torch.stack(last, 1) * cell


def _extent(points: Float[Tensor, "M N 2"], chosen: Bool[Tensor, "M N"]) -> tuple[Points, Points]:
    """Return the least and largest position of the chosen points; far apart if there is none."""
    far = 1e6
    # A point that is far beyond is appended, so that there is always one.
    least = F.pad(torch.where(chosen[..., None], points, far), (0, 0, 0, 1), value=far)
    largest = F.pad(torch.where(chosen[..., None], points, -far), (0, 0, 0, 1), value=-far)
    return least.amin(1), largest.amax(1)


def _widen(sides: Float[Tensor, "M 3 2"], side: int) -> Float[Tensor, "M 3 2"]:
    """Return sides of windows that are neither too narrow nor too small."""
    least = (MIN_ASPECT * sides.amax(2, keepdim=True)).clamp(min=MIN_SIDE * side)
    return torch.maximum(sides, least)


def _around(first: Points, last: Points, sides: Float[Tensor, "M K 2"]) -> Float[Tensor, "M K 4"]:
    center = ((first + last) / 2)[:, None]
    return torch.cat([center - sides / 2, center + sides / 2], 2)


@dataclass(frozen=True)
class WindowPrompts(Clicks):
    """Clicks, boxes and earlier masks of R windows, relative to them.

    Attributes:
        center: Center of the box, or of the clicks.
        radius: Half the width and height of the box, or the radius of a click's disc.
    """

    center: Float[Tensor, "R 2"]
    radius: Float[Tensor, "R 2"]

    @classmethod
    def from_shapes(cls, shapes: PromptShapes, windows: Float[Tensor, "M K 4"]) -> "WindowPrompts":
        """Return the prompts relative to K windows each, R = M x K in that order.

        Args:
            shapes: Prompts in input pixels.
            windows: Edges of the windows.
        """
        count = int(windows.shape[1])
        first, last = windows.flatten(0, 1).unflatten(1, (2, 2)).unbind(1)
        size = last - first
        repeat = {name: repeat_rows(value, count) for name, value in vars(shapes).items()}
        box = (repeat["box"].unflatten(1, (2, 2)) - first[:, None]) / size[:, None]
        has_box = repeat["has_box"][:, None]
        return cls(
            (repeat["points"] - first[:, None]) / size[:, None],
            repeat["positive"],
            repeat["negative"],
            repeat["has_box"],
            repeat["has_mask"],
            torch.where(has_box, box.mean(1), 0.5),
            torch.where(has_box, (box[:, 1] - box[:, 0]) / 2, DISC).clamp(min=1e-3),
        )

    def _offsets(self, samples: int) -> Float[Tensor, "R n n 2"]:
        """Return each sample's offset from the center of the box or click, 1 at the boundary."""
        centers = (torch.arange(samples, device=self.center.device) + 0.5) / samples
        grid = torch.stack(torch.meshgrid(centers, centers, indexing="xy"), 2)
        return (grid - self.center[:, None, None]) / self.radius[:, None, None]

    def prior(self, masks: WindowMaps | None, samples: int) -> WindowMaps:
        """Return the logits that the answer starts from.

        Args:
            masks: Logits of mask prompts in the windows.
            samples: Samples along each side of a window, n.
        """
        distance = self._offsets(samples).square().sum(3).sqrt()
        shape = (PRIOR_SLOPE * (1.05 - distance)).clamp(*PRIOR_RANGE)
        if masks is None:
            return shape
        return torch.where(self.has_mask[:, None, None], masks.clamp(-MAX_LOGIT, MAX_LOGIT), shape)

    def maps(self, masks: WindowMaps | None, samples: int) -> Float[Tensor, "R 8 n n"]:
        """Return what the prompt says about each sample.

        Args:
            masks: Logits of mask prompts in the windows.
            samples: Samples along each side of a window, n.
        """
        centers = (torch.arange(samples, device=self.center.device) + 0.5) / samples
        across = (centers - self.points[..., :1]).square()
        down = (centers - self.points[..., 1:]).square()
        squared = down[..., :, None] + across[..., None, :]
        one = (0, 0, 0, 0, 0, 1)  # a map of 0 is appended, so that there is always one
        clicks = [
            F.pad(torch.exp(-squared / (2 * deviation**2)) * chosen[..., None, None], one).amax(1)
            for chosen in (self.positive, self.negative)
            for deviation in GAUSSIANS
        ]
        offsets = self._offsets(samples)
        has_box = self.has_box[:, None, None]
        box = torch.sigmoid(10 * (1 - offsets.abs().amax(3))) * has_box
        ellipse = torch.exp(-offsets.square().sum(3).sqrt()) * has_box
        given = self.has_mask[:, None, None].to(box.dtype).expand_as(box)
        mask = torch.zeros_like(box)
        if masks is not None:
            mask = torch.where(self.has_mask[:, None, None], torch.sigmoid(masks), 0.0)
        return torch.stack([*clicks, box, ellipse, mask, given], 1)


def repeat_rows(rows: Shaped[Tensor, "M ..."], count: int) -> Shaped[Tensor, "R ..."]:
    """Return each row `count` times in a row; exported to ONNX, it takes any number of rows.

    Args:
        rows: The rows.
        count: How often each is repeated.
    """
    return rows[:, None].expand(-1, count, *rows.shape[1:]).flatten(0, 1)


def masks_in_windows(
    masks: Float[Tensor, "M G G"] | None, windows: Float[Tensor, "M K 4"], side: int, samples: int
) -> WindowMaps | None:
    """Return mask prompts in K windows each, R = M x K in that order; None if there are none.

    Args:
        masks: Logits of mask prompts.
        windows: Edges of the windows, in input pixels.
        side: Side of the model input in pixels.
        samples: Samples along each side of a window, n.
    """
    if masks is None:
        return None
    size = int(masks.shape[-1])
    matrices = sampling_matrices(windows.flatten(0, 1) * (size / side), (size, size), samples)
    sampled = sample_per_window(masks, matrices, int(windows.shape[1]))
    return sampled - 10 * (1 - coverage(matrices))


def widened(embedding: ImageEmbedding, prompts: Prompts) -> tuple[ImageEmbedding, Prompts]:
    """Return embedding, points and mask prompts in one type, float32 or wider.

    Args:
        embedding: Embeddings of B images, which choose the type.
        prompts: The prompts.
    """
    dtype = torch.promote_types(embedding.dtype, torch.float32)
    masks = None if prompts.masks is None else prompts.masks.to(dtype)
    points = prompts.points_xy_input.to(dtype)
    return embedding.to(dtype), replace(prompts, points_xy_input=points, masks=masks)


def likeness(
    features: Float[Tensor, "R C n n"], maps: Float[Tensor, "R 8 n n"], prior: WindowMaps
) -> Float[Tensor, "R L n n"]:
    """Return how alike each sample's features are to those that are prompted.

    Cosines, in groups of channels, with the mean under foreground clicks, under the prior mask, and
    under background clicks or where the prior mask is surely not.

    Args:
        features: Features in R windows.
        maps: Maps of the prompts, from `WindowPrompts.maps`.
        prior: Logits that the answer starts from.
    """
    inside = torch.sigmoid(prior)
    weights = torch.stack([maps[:, 0], inside, maps[:, 2] + (1 - inside).square()], 1).flatten(2)
    grouped = F.normalize(features.unflatten(1, (LIKENESS_CHANNELS // 3, -1)).flatten(3), dim=2)
    means = torch.einsum("rgcn,rwn->rwgc", grouped, weights)
    cosines = torch.einsum("rgcn,rwgc->rwgn", grouped, F.normalize(means, dim=3, eps=1e-6))
    return cosines.flatten(1, 2).unflatten(2, features.shape[2:])


def propagated(
    features: Float[Tensor, "R C n n"], maps: Float[Tensor, "R 8 n n"], prior: WindowMaps
) -> Float[Tensor, "R P n n"]:
    """Return what the prompt says of each sample, passed on between samples that are alike.

    Label propagation (Zhu and Ghahramani 2002): labels, 1 inside of the prior mask and -1 outside,
    moved by clicks, are averaged over all samples of the window, weighted by a softmax of the
    cosines of their centered features; then the result once more.

    Args:
        features: Features in R windows.
        maps: Maps of the prompts, from `WindowPrompts.maps`.
        prior: Logits that the answer starts from.
    """
    labels = (2 * torch.sigmoid(prior) - 1 + 2 * (maps[:, 0] - maps[:, 2])).clamp(-1, 1)
    each = features.flatten(2).transpose(1, 2)
    each = F.normalize(each - each.mean(1, keepdim=True), dim=2)
    weights = (AFFINITY * each @ each.transpose(1, 2)).softmax(2)
    steps = [labels.flatten(1)[..., None]]
    for _ in range(PROPAGATIONS):
        steps.append(weights @ steps[-1])
    return 2 * torch.cat(steps[1:], 2).transpose(1, 2).unflatten(2, labels.shape[1:])
