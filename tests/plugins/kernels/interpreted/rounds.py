"""A round of random predictions, and its targets."""

import torch

from gigamask.types import Prediction, PromptRound, Prompts, Targets

LOW_LOGIT = 1e-3
"""A logit that every dtype tells from 0."""


def make_round(
    masks: int,
    count: int,
    size: tuple[int, int],
    dtype: torch.dtype = torch.float32,
    soft: bool = False,
) -> tuple[PromptRound, Targets]:
    """Return a round whose logits and predicted IoU bf16 holds, on a grid with some padding."""
    height, width = size
    torch.manual_seed(masks + count + height + width)
    logits = (4 * torch.randn(masks, count, *size)).bfloat16().to(dtype)
    logits[:, :, ::5, ::4] *= 10
    logits = torch.where(logits.abs() < LOW_LOGIT, 1.0, logits).requires_grad_()
    predicted = torch.rand(masks, count).bfloat16().to(dtype).requires_grad_()
    shares = (2 * torch.rand(masks, *size) - 0.5).clamp(0, 1)
    inside = max(1, height - 2), max(1, width - 1)
    valid = torch.zeros(masks, *size, dtype=torch.bool)
    valid[:, : inside[0], : inside[1]] = True
    prompts = Prompts(torch.zeros(masks, 2, 2), torch.ones(masks, 2).long(), None, count > 1)
    targets = Targets(
        shares if soft else shares > 0.5,
        valid,
        torch.zeros(masks, 4),
        (4.0, 4.0),
        torch.full((masks, 2), 1.3),
        extent_xy=4.0 * torch.tensor([inside[::-1]]).expand(masks, 2),
    )
    return PromptRound(0, prompts, Prediction(logits, predicted, logits)), targets
