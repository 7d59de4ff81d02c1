"""The mix of prompts: one round in which each mask has points, a box, a mask or nothing. A value, so torch is imported only when it acts.

Every kind has the tokens that SAM's predictor sends: points and one padding point of label -1, a box's two corners, or none. There is room for the
longest kind; tokens that a mask has not are not present, and are not attended to.

Not here: SAM's own schedule (`policy`), how a click, a noisy box or a mask prompt is drawn (`clicks`, `boxes`, `mask_prompt`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import PromptSchedule
from gigamask.prompts.schedule import check_random_inputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int64
    from torch import Tensor

    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True)
class MixedPrompts(PromptSchedule):
    """One round of points, a box, a mask or no prompt, chosen for each mask; a second recipe, not SAM's.

    Points are uniform in the mask when positive and uniform in the background when negative; the first is positive. A mask without background has
    positive points only, one without a pixel negative ones. A mask prompt is the truth, moved and stretched so that its box becomes the noisy
    box, and as sure of itself as `mask_logit` says: what a mask prompt is without an earlier round is our choice.
    """

    point_prob: float = 0.5
    """The probability that a mask is prompted by points."""
    box_prob: float = 0.3
    """The probability that a mask is prompted by a box."""
    mask_prob: float = 0.15
    """The probability that a mask is prompted by a mask; what the three shares leave is prompted by nothing."""
    point_count_probs: tuple[float, ...] = (0.4, 0.3, 0.15, 0.1, 0.05)
    """The probabilities of one point, two points, and so on."""
    positive_prob: float | None = None
    """The probability that a point after the first is positive; None draws how many are positive, from one to all, each number equally likely."""
    box_noise: float = 0.1
    """The standard deviation of each side of a box, and of a mask prompt's, as a share of its width or height."""
    box_noise_limit_px: float = 20.0
    """The farthest a side moves, in input pixels."""
    mask_logit: float = 10.0
    """The logit of a mask prompt inside, and with a minus outside; SAM 2 takes a given mask for logits of 10."""
    multimask_output: bool = True
    """Whether three masks are asked for, of which the best is supervised; otherwise one, whatever the prompt."""

    def __post_init__(self) -> None:
        for name in ("point_prob", "box_prob", "mask_prob"):
            check_range(f"MixedPrompts.{name}", getattr(self, name), 0, 1)
        if (shares := self.point_prob + self.box_prob + self.mask_prob) > 1 + 1e-6:
            raise GigamaskError(
                f"MixedPrompts.point_prob, box_prob and mask_prob sum to {shares:.6g}, at most 1 can be shared out; give smaller ones"
            )
        for odds in self.point_count_probs:
            check_range("MixedPrompts.point_count_probs", odds, 0, 1)
        if abs(sum(self.point_count_probs) - 1) > 1e-6:
            raise GigamaskError(
                f"MixedPrompts.point_count_probs sum to {sum(self.point_count_probs):.6g}, probabilities sum to 1; give others"
            )
        if self.positive_prob is not None:
            check_range("MixedPrompts.positive_prob", self.positive_prob, 0, 1)
        check_range("MixedPrompts.box_noise", self.box_noise, 0, None)
        check_range("MixedPrompts.box_noise_limit_px", self.box_noise_limit_px, 0, None)
        check_range("MixedPrompts.mask_logit", self.mask_logit, 0, None)

    @property
    def rounds(self) -> int:
        return 1

    @property
    def num_uniforms(self) -> int:
        """How many click draws a mask needs: one for each point's place, then a number for how many there are and one for each further label."""
        most = len(self.point_count_probs)
        return most + (most + 1) // 2

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns each mask's prompt of the kind that `random_inputs.first` chooses; there is no second round."""
        if previous is not None:
            return None
        random_inputs = check_random_inputs(random_inputs, self)
        import torch
        from torch.nn import functional

        from gigamask.prompts.boxes import corner_labels, jittered_boxes
        from gigamask.prompts.masks import jittered_masks
        from gigamask.types import Prompts

        boxes = jittered_boxes(targets, random_inputs, self.box_noise, self.box_noise_limit_px)
        points, labels = self._points(targets, random_inputs)
        rest = labels.shape[1] - 2
        corners = functional.pad(boxes.to(points.dtype).unflatten(1, (2, 2)), (0, 0, 0, rest))
        kinds = functional.pad(corner_labels(len(labels), labels.device), (0, rest), value=-1)
        pointed = (random_inputs.first < self.point_prob)[:, None]
        boxed = (random_inputs.first < self.point_prob + self.box_prob)[:, None] & ~pointed
        masked = (random_inputs.first >= self.point_prob + self.box_prob) & (
            random_inputs.first < self.point_prob + self.box_prob + self.mask_prob
        )
        labels = torch.where(boxed, kinds, torch.where(pointed, labels, -1))
        return Prompts(
            points_xy_input=torch.where(
                (labels >= 0)[:, :, None], torch.where(boxed[:, :, None], corners, points), 0
            ),
            labels=labels,
            masks=jittered_masks(targets, boxes, self.mask_logit) if self.mask_prob else None,
            multimask_output=self.multimask_output,
            has_mask_prompt=masked if self.mask_prob else None,
            token_mask=(labels >= 0)
            | (
                pointed
                & (torch.arange(labels.shape[1], device=labels.device) == labels.shape[1] - 1)
            ),
        )

    def _points(
        self, targets: Targets, random_inputs: RandomInputs
    ) -> tuple[Float32[Tensor, "M N 2"], Int64[Tensor, "M N"]]:
        """Returns the points of every mask and a padding point."""
        import torch
        from torch.nn import functional

        from gigamask.prompts.clicks import cell_to_input, region_or, sample_click

        foreground, valid = targets.foreground, targets.valid
        inside, outside = (
            region_or(foreground & valid, valid),
            region_or(~foreground & valid, valid),
        )
        there, positive = self._kinds(random_inputs)
        clicks = []
        for place in range(len(self.point_count_probs)):
            region = torch.where(positive[:, place, None, None], inside, outside)
            clicks.append(sample_click(region, foreground, valid, random_inputs.clicks[:, place]))
        xy, labels = (torch.stack(each, 1) for each in zip(*clicks, strict=True))
        points = functional.pad(cell_to_input(xy, targets.cell_xy), (0, 0, 0, 1))
        return points, functional.pad(torch.where(there, labels, -1), (0, 1), value=-1)

    def _kinds(
        self, random_inputs: RandomInputs
    ) -> tuple[Bool[Tensor, "M n"], Bool[Tensor, "M n"]]:
        """Returns which points there are, and which are positive if there are."""
        import torch

        most = len(self.point_count_probs)
        chance = random_inputs.clicks[:, most : self.num_uniforms].flatten(1)
        there = torch.stack(
            [chance[:, 0] >= sum(self.point_count_probs[:place]) for place in range(most)], 1
        )
        if self.positive_prob is None:
            number = 1 + (chance[:, 1] * there.sum(1)).long()
            return there, torch.arange(most, device=number.device) < number[:, None]
        first = torch.ones_like(there[:, :1])
        return there, torch.cat([first, chance[:, 1:most] < self.positive_prob], 1)
