"""Inference: prompting a model about an image, and generating masks of everything in it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
