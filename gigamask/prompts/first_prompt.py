"""The first prompt of an interactive schedule: the truth and its draws enter, a point or a box for each mask leaves.

Not here: the prompts of later rounds (`policy`, `two_sided`), a first prompt of more kinds (`mixed`).
"""

import torch

from gigamask.prompts.boxes import corner_labels, jittered_boxes
from gigamask.prompts.clicks import cell_to_input, next_click
from gigamask.types import Prompts, RandomInputs, Targets


def point_or_box(
    targets: Targets,
    random_inputs: RandomInputs,
    box_prob: float,
    box_noise: float,
    box_noise_limit_px: float,
    center_click_prob: float = 0.0,
) -> Prompts:
    """Returns a noisy box where `random_inputs.first` is below `box_share`, else a point by the first click draw, uniform in the mask or, sometimes, central;
    a point is padded.
    """
    foreground = targets.foreground
    xy, label = next_click(
        torch.zeros_like(foreground),
        foreground,
        random_inputs.clicks[:, 0],
        targets.valid,
        center_click_prob,
    )
    point = cell_to_input(xy, targets.cell_xy)
    points = torch.stack([point, torch.zeros_like(point)], 1)
    labels = torch.stack([label, torch.full_like(label, -1)], 1)
    boxed = (random_inputs.first < box_prob)[:, None]
    corners = (
        jittered_boxes(targets, random_inputs, box_noise, box_noise_limit_px)
        .to(points.dtype)
        .unflatten(1, (2, 2))
    )
    return Prompts(
        points_xy_input=torch.where(boxed[:, :, None], corners, points),
        labels=torch.where(boxed, corner_labels(len(label), label.device), labels),
        masks=None,
        multimask_output=True,
    )
