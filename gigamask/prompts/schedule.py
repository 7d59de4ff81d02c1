"""Prompt schedules of SAM's training and evaluation.

A point prompt consists of the points and one padding point with label -1, as in SAM's predictor; a
box is two points with labels 2 and 3. Three masks are predicted for a single prompt (one point or
one box), one mask for more. Imports torch only in methods, so that recipes need no torch.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import PromptSchedule
from gigamask.lazy_numpy import np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True, kw_only=True)
class NoisyBoxes(PromptSchedule):
    """A schedule that draws noise for the sides of its boxes."""

    box_noise: float = 0.1
    """standard deviation of the noise on each side of a box, relative to its width or height"""
    box_noise_limit_px: float = 20.0
    """largest shift of a side of a box, in input pixels"""
    box_noise_varies: bool = False
    """draw the standard deviation of each box uniformly from 0 to `box_noise`"""

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_range(f"{name}.box_noise", self.box_noise, 0)
        check_range(f"{name}.box_noise_limit_px", self.box_noise_limit_px, 0)

    def noisy_boxes(self, targets: Targets, random_inputs: RandomInputs) -> Float[Tensor, "M 4"]:
        """Return the boxes of the targets with noise, xyxy in input pixels.

        Args:
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
        """
        from gigamask.prompts.boxes import jitter_boxes

        return jitter_boxes(
            targets, random_inputs, self.box_noise, self.box_noise_limit_px, self.box_noise_varies
        )


@dataclass(frozen=True)
class InteractiveSchedule(NoisyBoxes):
    """SAM's training schedule: a point or a box, then clicks in the error region.

    Two rounds have no new point, only the previous mask (Kirillov et al. 2023, appendix A).
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("first_prompts", "add_click")

    clicks: int = 8
    """rounds that add a click"""
    mask_only_rounds: bool = True
    """add two rounds without a new point: one before a randomly chosen click, and one at the end"""
    box_prob: float = 0.5
    """probability that the first prompt of a mask is a box, otherwise a point"""
    corrected: float = 1.0
    """fraction of the masks that have rounds after the first prompt; the others take little time,
    so that a step can have many more"""
    multimask: bool = True
    """predict three masks for the first prompt instead of one"""
    center_click_prob: float = 0.0
    """probability that a click is the pixel farthest from the boundary of the mask, or of its error
    region, as in evaluation; otherwise it is uniform in that region, as in SAM"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("InteractiveSchedule.clicks", self.clicks, int(self.mask_only_rounds))
        for name in ("center_click_prob", "box_prob", "corrected"):
            check_range(f"InteractiveSchedule.{name}", getattr(self, name), 0, 1)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return 1 + self.clicks + 2 * self.mask_only_rounds

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers per mask: one for each point."""
        return 1 + self.clicks

    @property
    def has_groups(self) -> bool:
        """Whether only a part of the masks is corrected."""
        return self.corrected < 1

    def groups(
        self, random_inputs: RandomInputs
    ) -> list[tuple[Bool[Tensor, "M"] | None, PromptSchedule]]:
        """Return the masks that are corrected, and those that have a box or a point alone.

        A box alone is answered with one mask, which is all it needs; a point with three.

        Args:
            random_inputs: Random numbers of the masks; on a GPU, reading them waits for it.
        """
        if not self.has_groups:
            return [(None, self)]
        first = random_inputs.first_prompt.cpu()
        # What the uniform number has beyond its first twelve bits is another one.
        corrected = (first * 4096) % 1 < self.corrected
        alone = replace(self, clicks=0, mask_only_rounds=False, corrected=1.0)
        boxes = replace(alone, box_prob=1.0, multimask=False)
        return [
            (corrected, replace(self, corrected=1.0)),
            (~corrected & (first < self.box_prob), boxes),
            (~corrected & (first >= self.box_prob), replace(alone, box_prob=0.0)),
        ]

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return a point or a box per mask; in later rounds, earlier tokens and usually a click.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
            mask_only_round_u: Uniform number in [0, 1) that picks the round without a new point.
        """
        random_inputs = check_random_inputs(random_inputs, self)
        index = 0 if previous is None else previous.index + 1
        if previous is None:
            return self.first_prompts(targets, random_inputs)
        if index >= self.rounds:
            return None
        mask_only_index = self.rounds
        if self.mask_only_rounds:
            mask_only_index = 1 + int(mask_only_round_u * self.clicks)
        if index == mask_only_index or index > self.clicks + self.mask_only_rounds:
            return _repeat_prompts(previous)
        uniforms = random_inputs.clicks[:, index - (index > mask_only_index)]
        return self.add_click(previous, targets, uniforms)

    def first_prompts(self, targets: Targets, random_inputs: RandomInputs) -> Prompts:
        """Return a point or a box per mask.

        Args:
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
        """
        boxes = self.noisy_boxes(targets, random_inputs)
        prompts = point_or_box(targets, random_inputs, boxes, self.box_prob, self.center_click_prob)
        return replace(prompts, multimask_output=self.multimask)

    def add_click(
        self, previous: PromptRound, targets: Targets, uniforms: Float[Tensor, "M 2"]
    ) -> Prompts:
        """Return the previous round's tokens, a click in its error region, and its mask.

        Args:
            previous: The previous round.
            targets: Ground truth of M masks.
            uniforms: Two uniform numbers in [0, 1) for each mask.
        """
        import torch

        from gigamask.prompts.clicks import cell_to_input, next_click
        from gigamask.types import Prompts

        earlier = previous.prompts
        xy, label = next_click(
            previous.pred_mask,
            targets.foreground,
            uniforms,
            targets.valid,
            self.center_click_prob,
            targets.clickable,
        )
        point = cell_to_input(xy, targets)[:, None]
        return Prompts(
            points_xy_input=torch.cat([earlier.points_xy_input, point], 1),
            labels=torch.cat([earlier.labels, label[:, None]], 1),
            masks=previous.mask_input,
            multimask_output=False,
        )


@dataclass(frozen=True)
class CenterClicks(PromptSchedule):
    """Evaluation clicks, each at the error pixel farthest from the error's boundary.

    Distances are exact (Kirillov et al. 2023, appendix D.1; Sofiiuk et al. 2021). False negatives
    and false positives are measured separately, with the image border as a boundary; the click is
    positive only if the false negatives' distance is strictly larger. No pixel is clicked twice:
    the farthest one not yet clicked is chosen, as in RITM's `Clicker`. Without an error, the click
    confirms the mask: in the target if possible, otherwise in the background; if no pixel is left,
    the token is padding.
    """

    clicks: int = 9
    """number of clicks, one per round"""
    feed_mask: bool = True
    """feed back the logits of the previous mask, as in training"""
    multimask: Literal["first", "always", "never"] = "first"
    """predict three masks for the first click, as SAM does, for every click, or never"""

    def __post_init__(self) -> None:
        check_range("CenterClicks.clicks", self.clicks, 1)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return self.clicks

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return the earlier clicks, a new one, and the padding point.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks; not used.
            mask_only_round_u: Not used.
        """
        if previous is not None and previous.index + 1 >= self.clicks:
            return None
        import torch

        from gigamask.prompts.clicks import cell_to_input, input_to_cell
        from gigamask.prompts.farthest import MAX_PIXELS, center_clicks
        from gigamask.types import Prompts

        foreground = targets.foreground
        points = torch.zeros(len(foreground), 0, 2, device=foreground.device)
        labels = torch.zeros(len(foreground), 0, dtype=torch.int64, device=foreground.device)
        pred_mask = foreground.new_zeros(()).expand_as(foreground)
        if previous is not None:
            points, labels = (
                previous.prompts.points_xy_input[:, :-1],
                previous.prompts.labels[:, :-1],
            )
            pred_mask = previous.pred_mask
        tensors = (foreground, pred_mask, targets.valid, input_to_cell(points, targets))
        fits = foreground[:1].numel() <= MAX_PIXELS
        choose = center_clicks if foreground.is_cuda and fits else center_clicks_in_threads
        click = choose(*tensors).to(foreground.device)
        point = cell_to_input(click[:, :2], targets)[:, None]
        return Prompts(
            points_xy_input=torch.cat([points, point, torch.zeros_like(point)], 1),
            labels=torch.cat([labels, click[:, 2:], torch.full_like(click[:, 2:], -1)], 1),
            masks=previous.mask_input if previous is not None and self.feed_mask else None,
            multimask_output=self.multimask != "never"
            and (previous is None or self.multimask == "always"),
        )


@dataclass(frozen=True)
class UniformClicks(PromptSchedule):
    """Evaluation clicks drawn uniformly from the mask, all positive; three masks after each.

    The prediction is neither corrected nor fed back (Xiong et al. 2023, section 4.3).
    """

    clicks: int = 3
    """number of clicks, one per round"""

    def __post_init__(self) -> None:
        check_range("UniformClicks.clicks", self.clicks, 1)

    rounds = num_uniforms = CenterClicks.rounds  # a pair of uniform numbers for each click

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return the earlier clicks, a new one, and the padding point.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
            mask_only_round_u: Not used.
        """
        count = 1 if previous is None else previous.index + 2
        if count > self.clicks:
            return None
        import torch

        from gigamask.prompts.clicks import cell_to_input, sample_click
        from gigamask.types import Prompts

        uniforms = check_random_inputs(random_inputs, self).clicks
        inside, valid = targets.foreground & targets.valid, targets.valid
        clicks = [sample_click(inside, inside, valid, uniforms[:, i]) for i in range(count)]
        points = torch.stack([cell_to_input(xy, targets) for xy, _ in clicks], 1)
        labels = torch.stack([label for _, label in clicks], 1)
        return Prompts(
            points_xy_input=torch.cat([points, torch.zeros_like(points[:, :1])], 1),
            labels=torch.cat([labels, torch.full_like(labels[:, :1], -1)], 1),
            masks=None,
            multimask_output=True,
        )


@dataclass(frozen=True)
class BoxPrompt(PromptSchedule):
    """Evaluation box prompt: the exact box of each mask."""

    multimask: bool = True
    """predict three masks instead of one"""
    refine: bool = False
    """predict a second time, from the box and the mask with the highest predicted IoU"""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return 1 + self.refine

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return the two corners of each box, in a second round with the mask of the first.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks; not used.
            mask_only_round_u: Not used.
        """
        if previous is not None:
            return _repeat_prompts(previous) if previous.index + 1 < self.rounds else None
        from gigamask.prompts.boxes import corner_labels
        from gigamask.types import Prompts

        corners = targets.boxes_input.float().unflatten(1, (2, 2))
        return Prompts(
            points_xy_input=corners,
            labels=corner_labels(len(corners), corners.device),
            masks=None,
            multimask_output=self.multimask,
        )


def check_random_inputs(
    random_inputs: RandomInputs | None, schedule: PromptSchedule
) -> RandomInputs:
    """Check that there are enough random numbers for a schedule, and return them.

    Args:
        random_inputs: Random numbers of the masks.
        schedule: The schedule that uses them.

    Raises:
        GigamaskError: A mask has too few random numbers for its clicks.
    """
    available = 0 if random_inputs is None else random_inputs.clicks.shape[1]
    if random_inputs is None or available < schedule.num_uniforms:
        raise GigamaskError(
            f"{type(schedule).__name__} needs {schedule.num_uniforms} pairs of uniform numbers per "
            f"mask (got {available}); set RandomSpec.clicks to the schedule's num_uniforms"
        )
    return random_inputs


def point_or_box(
    targets: Targets,
    random_inputs: RandomInputs,
    boxes: Float[Tensor, "M 4"],
    box_prob: float,
    center_click_prob: float = 0.0,
) -> Prompts:
    """Return the first prompt of each mask: a box, or a point and a padding point.

    Args:
        targets: Ground truth of M masks.
        random_inputs: Random numbers of the masks; masks whose `first` is below `box_prob` get a
            box, the others a point chosen by the first pair of `clicks`.
        boxes: Boxes, xyxy in input pixels, with noise.
        box_prob: Probability of a box.
        center_click_prob: Probability that the point is the pixel farthest from the boundary;
            otherwise it is uniform in the mask.
    """
    import torch

    from gigamask.prompts.boxes import corner_labels
    from gigamask.prompts.clicks import cell_to_input, next_click
    from gigamask.types import Prompts

    foreground = targets.foreground
    xy, label = next_click(
        torch.zeros_like(foreground),
        foreground,
        random_inputs.clicks[:, 0],
        targets.valid,
        center_click_prob,
        targets.clickable,
    )
    point = cell_to_input(xy, targets)
    points = torch.stack([point, torch.zeros_like(point)], 1)
    labels = torch.stack([label, torch.full_like(label, -1)], 1)
    is_box = (random_inputs.first_prompt < box_prob)[:, None]
    corners = boxes.to(points.dtype).unflatten(1, (2, 2))
    return Prompts(
        points_xy_input=torch.where(is_box[:, :, None], corners, points),
        labels=torch.where(is_box, corner_labels(len(label), label.device), labels),
        masks=None,
        multimask_output=True,
    )


def _repeat_prompts(previous: PromptRound) -> Prompts:
    """Return the previous round's tokens and its mask."""
    return replace(previous.prompts, masks=previous.mask_input, multimask_output=False)


def center_clicks_in_threads(*tensors: Tensor) -> Int64[Tensor, "M 3"]:
    """Return what `farthest.center_clicks` does, mask by mask in threads."""
    import torch

    # OpenCV and NumPy release the interpreter's lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        clicks = list(pool.map(_center_click, *(tensor.cpu().numpy() for tensor in tensors)))
    return torch.tensor(clicks, dtype=torch.int64).reshape(-1, 3)


def _center_click(
    target: Bool[np.ndarray, "H W"],
    pred_mask: Bool[np.ndarray, "H W"],
    valid: Bool[np.ndarray, "H W"],
    clicked: Int64[np.ndarray, "n 2"],
) -> tuple[int, int, int]:
    """Return x, y and label of one mask's next click."""
    from gigamask.masks.boundary import farthest_point, mask_extent

    extents = [extent for extent in map(mask_extent, (target, pred_mask)) if extent[1]]
    top, left = (min([each[side] for each in extents], default=0) for side in (0, 2))
    bottom, right = (max([each[side] for each in extents], default=0) for side in (1, 3))
    box, taken = np.s_[top:bottom, left:right], clicked - (left, top)
    # Of two bools, only true is greater than false.
    miss = farthest_point((target[box] > pred_mask[box]) & valid[box], taken)
    false_alarm = farthest_point((pred_mask[box] > target[box]) & valid[box], taken, miss[2])
    if miss[2] > false_alarm[2]:
        return left + miss[0], top + miss[1], 1
    if false_alarm[2] > 0:
        return left + false_alarm[0], top + false_alarm[1], 0
    for region, label in ((target & valid, 1), (~target & valid, 0)):
        x, y, distance = farthest_point(region, clicked)
        if distance > 0:
            return x, y, label
    return 0, 0, -1
