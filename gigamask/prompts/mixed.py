"""A prompt schedule of one round in which each mask has points, a box, a mask or no prompt.

Each kind has the tokens of SAM's predictor: points and one padding point with label -1, the two
corners of a box, or none. All masks have the same number of tokens; unused ones are masked out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.errors import GigamaskError, check_range
from gigamask.prompts.schedule import NoisyBoxes, check_random_inputs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float32, Int64
    from torch import Tensor

    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True)
class MixedPrompts(NoisyBoxes):
    """One round of points, a box, a mask or no prompt, chosen for each mask; not SAM's schedule.

    Positive points are uniform in the mask, negative ones in the background; the first is positive.
    A mask without background has only positive points, an empty one only negative points. A mask
    prompt is the ground truth, moved and stretched so that its box becomes the noisy box, with
    logits of `mask_logit`; no publication defines a mask prompt without an earlier round.
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("prompts",)

    point_prob: float = 0.5
    """probability that a mask is prompted by points"""
    box_prob: float = 0.3
    """probability that a mask is prompted by a box"""
    mask_prob: float = 0.15
    """probability that a mask is prompted by a mask; with the remaining probability it has no
    prompt"""
    point_count_probs: tuple[float, ...] = (0.4, 0.3, 0.15, 0.1, 0.05)
    """probabilities of one point, two points, and so on"""
    positive_prob: float | None = None
    """probability that a point after the first is positive; None draws the number of positive
    points uniformly from one to all"""
    mask_logit: float = 10.0
    """logit of a mask prompt inside the mask, negated outside (SAM 2: 10 for an input mask)"""
    multimask_output: bool = True
    """predict three masks, of which the best is supervised; otherwise one"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("point_prob", "box_prob", "mask_prob"):
            check_range(f"MixedPrompts.{name}", getattr(self, name), 0, 1)
        if (total := self.point_prob + self.box_prob + self.mask_prob) > 1 + 1e-6:
            raise GigamaskError(
                "MixedPrompts.point_prob, box_prob and mask_prob must sum to at most 1 "
                f"(got {total:.6g})"
            )
        for probability in self.point_count_probs:
            check_range("MixedPrompts.point_count_probs", probability, 0, 1)
        if abs((total := sum(self.point_count_probs)) - 1) > 1e-6:
            raise GigamaskError(f"MixedPrompts.point_count_probs must sum to 1 (got {total:.6g})")
        check_range("MixedPrompts.positive_prob", self.positive_prob, 0, 1)
        check_range("MixedPrompts.mask_logit", self.mask_logit, 0)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return 1

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers per mask.

        One pair for the position of each point, one number for the number of points, and one for
        the label of each point after the first.
        """
        max_points = len(self.point_count_probs)
        return max_points + (max_points + 1) // 2

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return a prompt for each mask, of a kind chosen at random; there is no second round.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks; `first` chooses the kind.
            mask_only_round_u: Not used.
        """
        if previous is not None:
            return None
        return self.prompts(targets, check_random_inputs(random_inputs, self))

    def prompts(self, targets: Targets, random_inputs: RandomInputs) -> Prompts:
        """Return a prompt for each mask, of a kind chosen at random.

        Args:
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
        """
        import torch
        from torch.nn import functional

        from gigamask.prompts.boxes import corner_labels
        from gigamask.prompts.masks import jitter_masks
        from gigamask.types import Prompts

        boxes = self.noisy_boxes(targets, random_inputs)
        points, labels = self._points(targets, random_inputs)
        tokens = labels.shape[1]
        corners = boxes.to(points.dtype).unflatten(1, (2, 2))
        corners = functional.pad(corners, (0, 0, 0, tokens - 2))
        box_labels = corner_labels(len(labels), labels.device)
        box_labels = functional.pad(box_labels, (0, tokens - 2), value=-1)
        first = random_inputs.first_prompt
        has_points = (first < self.point_prob)[:, None]
        has_box = (first < self.point_prob + self.box_prob)[:, None] & ~has_points
        has_mask = (first >= self.point_prob + self.box_prob) & (
            first < self.point_prob + self.box_prob + self.mask_prob
        )
        labels = torch.where(has_box, box_labels, torch.where(has_points, labels, -1))
        is_last = torch.arange(tokens, device=labels.device) == tokens - 1
        return Prompts(
            points_xy_input=torch.where(
                (labels >= 0)[:, :, None], torch.where(has_box[:, :, None], corners, points), 0
            ),
            labels=labels,
            masks=jitter_masks(targets, boxes, self.mask_logit) if self.mask_prob else None,
            multimask_output=self.multimask_output,
            has_mask_prompt=has_mask if self.mask_prob else None,
            token_mask=(labels >= 0) | (has_points & is_last),
        )

    def _points(
        self, targets: Targets, random_inputs: RandomInputs
    ) -> tuple[Float32[Tensor, "M N 2"], Int64[Tensor, "M N"]]:
        """Return the points of every mask and a padding point."""
        import torch
        from torch.nn import functional

        from gigamask.prompts.clicks import cell_to_input, fallback_if_empty, sample_click

        foreground, valid = targets.foreground, targets.valid
        inside = targets.clickable
        outside = fallback_if_empty(~foreground & valid, valid)
        present, positive = self._point_kinds(random_inputs)
        clicks = []
        for number in range(len(self.point_count_probs)):
            region = torch.where(positive[:, number, None, None], inside, outside)
            clicks.append(sample_click(region, foreground, valid, random_inputs.clicks[:, number]))
        xy, labels = (torch.stack(tensors, 1) for tensors in zip(*clicks, strict=True))
        points = functional.pad(cell_to_input(xy, targets), (0, 0, 0, 1))
        return points, functional.pad(torch.where(present, labels, -1), (0, 1), value=-1)

    def _point_kinds(
        self, random_inputs: RandomInputs
    ) -> tuple[Bool[Tensor, "M n"], Bool[Tensor, "M n"]]:
        """Return which points are present, and which of them are positive."""
        import torch

        max_points = len(self.point_count_probs)
        uniforms = random_inputs.clicks[:, max_points : self.num_uniforms].flatten(1)
        thresholds = [sum(self.point_count_probs[:number]) for number in range(max_points)]
        present = torch.stack([uniforms[:, 0] >= threshold for threshold in thresholds], 1)
        if self.positive_prob is None:
            positives = 1 + (uniforms[:, 1] * present.sum(1)).long()
            numbers = torch.arange(max_points, device=positives.device)
            return present, numbers < positives[:, None]
        first = torch.ones_like(present[:, :1])
        return present, torch.cat([first, uniforms[:, 1:max_points] < self.positive_prob], 1)
