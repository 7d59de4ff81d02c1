"""Losses: focal, dice and IoU regression for SAM, hard example mining, MAE and grounding."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
