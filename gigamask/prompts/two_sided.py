"""Corrections on both sides: the previous round and the truth enter, its tokens with a point in the misses and one in the false alarms leave.

A value, so torch is imported only when it acts. After micro-sam (`micro_sam/prompt_generators.py`), whose rounds add two points each.

Not here: one point a round (`policy.InteractiveSchedule`), how the clicks are drawn (`clicks`), the first prompt (`first_prompt`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gigamask.faults import check_range
from gigamask.prompts.policy import enough
from gigamask.seams import Policy

if TYPE_CHECKING:
    from gigamask.contracts import Draws, Prompts, Round, Truth


@dataclass(frozen=True)
class TwoSidedCorrection(Policy):
    """A point or a box, then rounds that add a positive point in the misses and a negative one in the false alarms, and feed the mask back.

    A side without an error adds a token that is not present; where nothing is wrong at all the first of the two points confirms, as SAM's schedule
    does here. micro-sam looks for a substitute on each empty side, in what is right already or in a ring around the box; such a point corrects
    nothing, so we leave it out.
    """

    corrections: int = 7
    """How many rounds add two points; micro-sam has 8 rounds with the first."""
    box_share: float = 0.5
    """The probability that a mask's first prompt is a box; otherwise it is a point."""
    box_noise: float = 0.1
    """The standard deviation of each side of a box as a share of its width or height."""
    box_noise_limit_px: float = 20.0
    """The farthest a side of a box moves, in input pixels."""

    def __post_init__(self) -> None:
        check_range("TwoSidedCorrection.corrections", self.corrections, 0, None)
        check_range("TwoSidedCorrection.box_share", self.box_share, 0, 1)
        check_range("TwoSidedCorrection.box_noise", self.box_noise, 0, None)
        check_range("TwoSidedCorrection.box_noise_limit_px", self.box_noise_limit_px, 0, None)

    @property
    def rounds(self) -> int:
        return 1 + self.corrections

    @property
    def draws(self) -> int:
        """How many click draws a mask needs: the first point and both of each correction."""
        return 1 + 2 * self.corrections

    def next(self, previous: Round | None, truth: Truth, draws: Draws | None, pause: float) -> Prompts | None:
        """Returns a point or a box for each mask, then every earlier token and two points."""
        draws = enough(draws, self)
        import torch

        from gigamask.contracts import Prompts
        from gigamask.prompts.clicks import cell_to_input, sided_clicks
        from gigamask.prompts.first_prompt import point_or_box

        if previous is None:
            return point_or_box(truth, draws, self.box_share, self.box_noise, self.box_noise_limit_px)
        if previous.index >= self.corrections:
            return None
        spent = 1 + 2 * previous.index
        xy, labels = sided_clicks(previous.guess, truth.foreground, draws.clicks[:, spent : spent + 2], truth.valid)
        new = torch.where((labels >= 0)[:, :, None], cell_to_input(xy, truth.cell_xy), 0)
        before = previous.prompts
        there = torch.ones_like(before.labels, dtype=torch.bool) if before.present is None else before.present
        return Prompts(
            points_xy_input=torch.cat([before.points_xy_input, new], 1),
            labels=torch.cat([before.labels, labels], 1),
            masks=previous.handed_on,
            several=False,
            present=torch.cat([there, labels >= 0], 1),
        )
