"""Inference: predicting masks from prompts, and generating masks of everything in an image."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
