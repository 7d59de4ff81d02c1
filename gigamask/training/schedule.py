"""The learning rate schedules, at the path from which recipes of users import them."""

from gigamask.training.optim import WarmupCosine, WarmupMultiStep

__all__ = ["WarmupCosine", "WarmupMultiStep"]
