"""Simulated prompts: clicks, boxes, masks, and the schedules of rounds that combine them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
