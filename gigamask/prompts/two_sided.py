"""Corrections on both sides: the previous round and the truth enter, its tokens with a point in the misses and one in the false alarms leave.

A value, so torch is imported only when it acts. After micro-sam (`micro_sam/prompt_generators.py`), whose rounds add two points each.

Not here: one point a round (`policy.InteractiveSchedule`), how the clicks are drawn (`clicks`), the first prompt (`first_prompt`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.errors import check_range
from gigamask.interfaces import PromptSchedule
from gigamask.prompts.schedule import check_random_inputs

if TYPE_CHECKING:
    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True)
class TwoSidedCorrection(PromptSchedule):
    """A point or a box, then rounds that add a positive point in the misses and a negative one in the false alarms, and feed the mask back.

    A side without an error adds a token that is not present; where nothing is wrong at all the first of the two points confirms, as SAM's schedule
    does here. micro-sam looks for a substitute on each empty side, in what is right already or in a ring around the box; such a point corrects
    nothing, so we leave it out.
    """

    corrections: int = 7
    """How many rounds add two points; micro-sam has 8 rounds with the first."""
    box_prob: float = 0.5
    """The probability that a mask's first prompt is a box; otherwise it is a point."""
    box_noise: float = 0.1
    """The standard deviation of each side of a box as a share of its width or height."""
    box_noise_limit_px: float = 20.0
    """The farthest a side of a box moves, in input pixels."""

    def __post_init__(self) -> None:
        check_range("TwoSidedCorrection.corrections", self.corrections, 0, None)
        check_range("TwoSidedCorrection.box_share", self.box_prob, 0, 1)
        check_range("TwoSidedCorrection.box_noise", self.box_noise, 0, None)
        check_range("TwoSidedCorrection.box_noise_limit_px", self.box_noise_limit_px, 0, None)

    @property
    def rounds(self) -> int:
        return 1 + self.corrections

    @property
    def num_uniforms(self) -> int:
        """How many click draws a mask needs: the first point and both of each correction."""
        return 1 + 2 * self.corrections

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns a point or a box for each mask, then every earlier token and two points."""
        random_inputs = check_random_inputs(random_inputs, self)
        import torch

        from gigamask.prompts.clicks import cell_to_input, sample_fp_fn_clicks
        from gigamask.prompts.first_prompt import point_or_box
        from gigamask.types import Prompts

        if previous is None:
            return point_or_box(
                targets, random_inputs, self.box_prob, self.box_noise, self.box_noise_limit_px
            )
        if previous.index >= self.corrections:
            return None
        spent = 1 + 2 * previous.index
        xy, labels = sample_fp_fn_clicks(
            previous.pred_mask,
            targets.foreground,
            random_inputs.clicks[:, spent : spent + 2],
            targets.valid,
        )
        new = torch.where((labels >= 0)[:, :, None], cell_to_input(xy, targets.cell_xy), 0)
        before = previous.prompts
        there = (
            torch.ones_like(before.labels, dtype=torch.bool)
            if before.token_mask is None
            else before.token_mask
        )
        return Prompts(
            points_xy_input=torch.cat([before.points_xy_input, new], 1),
            labels=torch.cat([before.labels, labels], 1),
            masks=previous.mask_input,
            multimask_output=False,
            token_mask=torch.cat([there, labels >= 0], 1),
        )
