"""The schedules: the previous round and the truth enter, the next round's prompts leave. Values, so torch is imported only when they act.

Tokens: a point prompt is the points and one padding point of label -1, as SAM's own predictor sends; a box is two points of labels 2 and 3.
Three masks are asked for a single prompt (one point or one box), the single-mask token for more.

Not here: the mix of all kinds of prompts (`mixed`), corrections on both sides (`two_sided`), how a click or a noisy box is drawn (`clicks`,
`boxes`), playing the rounds (`rounds`), the numbers spent (`data.dataset`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gigamask.errors import GigamaskError, check_range
from gigamask.interfaces import PromptSchedule

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

    from gigamask.types import PromptRound, Prompts, RandomInputs, Targets


@dataclass(frozen=True)
class InteractiveSchedule(PromptSchedule):
    """SAM's training schedule: a point or a box, then clicks in the error region, then twice only the mask (Kirillov et al. 2023, appendix A)."""

    clicks: int = 8
    """How many rounds add a click."""
    mask_only_rounds: bool = True
    """Whether two more rounds feed the mask back without a new point: one directly before a click chosen at random, one last."""
    box_prob: float = 0.5
    """The probability that a mask's first prompt is a box; otherwise it is a point."""
    box_noise: float = 0.1
    """The standard deviation of each side of a box as a share of its width or height."""
    box_noise_limit_px: float = 20.0
    """The farthest a side of a box moves, in input pixels."""
    center_click_prob: float = 0.0
    """The probability that a click lies deepest inside the mask, or inside its errors, as evaluation's do; otherwise it is uniform there as SAM's."""

    def __post_init__(self) -> None:
        check_range("InteractiveSchedule.central_share", self.center_click_prob, 0, 1)
        check_range(
            "InteractiveSchedule.clicks", self.clicks, 1 if self.mask_only_rounds else 0, None
        )
        check_range("InteractiveSchedule.box_share", self.box_prob, 0, 1)
        check_range("InteractiveSchedule.box_noise", self.box_noise, 0, None)
        check_range("InteractiveSchedule.box_noise_limit_px", self.box_noise_limit_px, 0, None)

    @property
    def rounds(self) -> int:
        return 1 + self.clicks + 2 * self.mask_only_rounds

    @property
    def num_uniforms(self) -> int:
        """How many click draws a mask needs: the first point and each later one."""
        return 1 + self.clicks

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns a point or a box for each mask, then every earlier token with a new click, or without one in a pause."""
        random_inputs = check_random_inputs(random_inputs, self)
        index = 0 if previous is None else previous.index + 1
        if previous is None:
            from gigamask.prompts.first_prompt import point_or_box

            return point_or_box(
                targets,
                random_inputs,
                self.box_prob,
                self.box_noise,
                self.box_noise_limit_px,
                self.center_click_prob,
            )
        if index >= self.rounds:
            return None
        place = 1 + int(mask_only_round_u * self.clicks) if self.mask_only_rounds else self.rounds
        if index == place or index > self.clicks + self.mask_only_rounds:
            return _repeat_prompts(previous)
        return _add_click(
            previous,
            targets,
            random_inputs.clicks[:, index - (index > place)],
            self.center_click_prob,
        )


@dataclass(frozen=True)
class CenterClicks(PromptSchedule):
    """Evaluation's clicks: each at the pixel deepest inside the errors, found exactly (Kirillov et al. 2023, appendix D.1; Sofiiuk et al. 2021).

    Misses and false alarms are measured apart, with the picture's border as a boundary; the click is positive only where the miss is strictly
    deeper. No pixel is clicked twice: among those not clicked yet the deepest is taken, as RITM's `Clicker` does. Without an error left the click
    confirms: deepest in the truth, then in the background, and where that is used up too the token is padding.
    """

    clicks: int = 9
    """How many clicks, one each round."""
    feed_mask: bool = True
    """Whether the previous mask's logits are fed back, as in training."""

    def __post_init__(self) -> None:
        check_range("CenterClicks.clicks", self.clicks, 1, None)

    @property
    def rounds(self) -> int:
        return self.clicks

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns every earlier click, a new one, and the padding point; nothing is random."""
        if previous is not None and previous.index + 1 >= self.clicks:
            return None
        import torch

        from gigamask.prompts.clicks import cell_to_input, input_to_cell
        from gigamask.types import Prompts

        foreground = targets.foreground
        points = torch.zeros(len(foreground), 0, 2, device=foreground.device)
        labels = torch.zeros(len(foreground), 0, dtype=torch.int64, device=foreground.device)
        pred_mask = torch.zeros_like(foreground)
        if previous is not None:
            points, labels = (
                previous.prompts.points_xy_input[:, :-1],
                previous.prompts.labels[:, :-1],
            )
            pred_mask = previous.pred_mask
        asked = (foreground, pred_mask, targets.valid, input_to_cell(points, targets.cell_xy))
        found = [
            _center_click(*each)
            for each in zip(*(tensor.cpu().numpy() for tensor in asked), strict=True)
        ]
        click = torch.tensor(found, dtype=torch.int64, device=foreground.device).reshape(-1, 3)
        new = cell_to_input(click[:, :2], targets.cell_xy)
        return Prompts(
            points_xy_input=torch.cat([points, new[:, None], torch.zeros_like(new)[:, None]], 1),
            labels=torch.cat([labels, click[:, 2:], torch.full_like(click[:, 2:], -1)], 1),
            masks=previous.mask_input if previous is not None and self.feed_mask else None,
            multimask_output=previous is None,
        )


@dataclass(frozen=True)
class BoxPrompt(PromptSchedule):
    """Evaluation's box: one round with each mask's exact box."""

    @property
    def rounds(self) -> int:
        return 1

    def next(
        self,
        previous: PromptRound | None,
        targets: Targets,
        random_inputs: RandomInputs | None,
        mask_only_round_u: float,
    ) -> Prompts | None:
        """Returns the two corners of each box; there is no second round."""
        if previous is not None:
            return None
        from gigamask.prompts.boxes import corner_labels
        from gigamask.types import Prompts

        corners = targets.boxes_input.float().unflatten(1, (2, 2))
        return Prompts(
            points_xy_input=corners,
            labels=corner_labels(len(corners), corners.device),
            masks=None,
            multimask_output=True,
        )


def check_random_inputs(random_inputs: RandomInputs | None, policy: PromptSchedule) -> RandomInputs:
    """Returns the draws; raises a fault where a mask has fewer clicks than the policy spends."""
    given = 0 if random_inputs is None else random_inputs.clicks.shape[1]
    if random_inputs is None or given < policy.num_uniforms:
        name = type(policy).__name__
        raise GigamaskError(
            f"{name}: {given} click draws for each mask, {policy.num_uniforms} are spent; set Chance.clicks to the policy's draws"
        )
    return random_inputs


def _repeat_prompts(previous: PromptRound) -> Prompts:
    """Returns the previous round's tokens with its mask fed back."""
    from gigamask.types import Prompts

    asked = previous.prompts
    return Prompts(
        points_xy_input=asked.points_xy_input,
        labels=asked.labels,
        masks=previous.mask_input,
        multimask_output=False,
    )


def _add_click(
    previous: PromptRound,
    targets: Targets,
    uniforms: Float[Tensor, "M 2"],
    center_click_prob: float,
) -> Prompts:
    """Returns the previous round's tokens and a click in its error region, with its mask fed back."""
    import torch

    from gigamask.prompts.clicks import cell_to_input, next_click
    from gigamask.types import Prompts

    xy, label = next_click(
        previous.pred_mask, targets.foreground, uniforms, targets.valid, center_click_prob
    )
    return Prompts(
        points_xy_input=torch.cat(
            [previous.prompts.points_xy_input, cell_to_input(xy, targets.cell_xy)[:, None]], 1
        ),
        labels=torch.cat([previous.prompts.labels, label[:, None]], 1),
        masks=previous.mask_input,
        multimask_output=False,
    )


def _center_click(
    targets: Bool[np.ndarray, "H W"],
    pred_mask: Bool[np.ndarray, "H W"],
    valid: Bool[np.ndarray, "H W"],
    clicked: Int64[np.ndarray, "n 2"],
) -> tuple[int, int, int]:
    """Returns x, y and label of one mask's next click."""
    from gigamask.masks.boundary import farthest_point

    wrong = (targets ^ pred_mask) & valid
    miss, alarm = (
        farthest_point(wrong & targets, clicked),
        farthest_point(wrong & pred_mask, clicked),
    )
    if miss[2] > alarm[2]:
        return miss[0], miss[1], 1
    if alarm[2] > 0:
        return alarm[0], alarm[1], 0
    for region, label in ((targets & valid, 1), (~targets & valid, 0)):
        x, y, depth = farthest_point(region, clicked)
        if depth > 0:
            return x, y, label
    return 0, 0, -1
