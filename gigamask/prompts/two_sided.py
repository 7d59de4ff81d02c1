"""A prompt schedule that corrects false negatives and false positives in every round.

Follows micro-sam (`micro_sam/prompt_generators.py`), whose rounds add two points each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gigamask.errors import check_range
from gigamask.prompts.schedule import NoisyBoxes, check_random_inputs, point_or_box

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True)
class TwoSidedCorrection(NoisyBoxes):
    """A point or a box, then rounds with a positive and a negative point and the previous mask.

    The positive point lies in the false negatives, the negative one in the false positives. A mask
    without one of these errors gets a masked-out token for it; without any error, the first point
    confirms the mask, as in `InteractiveSchedule`. micro-sam instead adds a point in a correct
    region or in a ring around the box, which corrects nothing and is left out here.
    """

    compiled_methods: ClassVar[tuple[str, ...]] = ("first_prompts", "add_clicks")

    corrections: int = 7
    """rounds that add two points (micro-sam: 8 rounds including the first)"""
    box_prob: float = 0.5
    """probability that the first prompt of a mask is a box, otherwise a point"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("TwoSidedCorrection.corrections", self.corrections, 0)
        check_range("TwoSidedCorrection.box_prob", self.box_prob, 0, 1)

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return 1 + self.corrections

    @property
    def num_uniforms(self) -> int:
        """Pairs of uniform numbers per mask: one for each point."""
        return 1 + 2 * self.corrections

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Return a point or a box per mask; in later rounds, earlier tokens and two points.

        Args:
            previous: The previous round; None before the first.
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
            mask_only_round_u: Not used.
        """
        random_inputs = check_random_inputs(random_inputs, self)
        if previous is None:
            return self.first_prompts(targets, random_inputs)
        if previous.index >= self.corrections:
            return None
        used = 1 + 2 * previous.index
        return self.add_clicks(previous, targets, random_inputs.clicks[:, used : used + 2])

    def first_prompts(self, targets: Targets, random_inputs: RandomInputs) -> Prompts:
        """Return a point or a box per mask.

        Args:
            targets: Ground truth of M masks.
            random_inputs: Random numbers of the masks.
        """
        boxes = self.noisy_boxes(targets, random_inputs)
        return point_or_box(targets, random_inputs, boxes, self.box_prob)

    def add_clicks(
        self, previous: PromptRound, targets: Targets, uniforms: Float[Tensor, "M 2 2"]
    ) -> Prompts:
        """Return the previous round's tokens, two points, and its mask.

        Args:
            previous: The previous round.
            targets: Ground truth of M masks.
            uniforms: Two uniform numbers in [0, 1) for each point of each mask.
        """
        import torch

        from gigamask.prompts.clicks import cell_to_input, sample_fp_fn_clicks
        from gigamask.types import Prompts

        xy, labels = sample_fp_fn_clicks(
            previous.pred_mask, targets.foreground, uniforms, targets.valid
        )
        points = torch.where((labels >= 0)[:, :, None], cell_to_input(xy, targets), 0)
        earlier = previous.prompts
        token_mask = earlier.token_mask
        if token_mask is None:
            token_mask = torch.ones_like(earlier.labels, dtype=torch.bool)
        return Prompts(
            points_xy_input=torch.cat([earlier.points_xy_input, points], 1),
            labels=torch.cat([earlier.labels, labels], 1),
            masks=previous.mask_input,
            multimask_output=False,
            token_mask=torch.cat([token_mask, labels >= 0], 1),
        )
