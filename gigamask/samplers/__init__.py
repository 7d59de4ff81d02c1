"""Samplers: the order of samples in an epoch, and its split over steps, ranks and micro-batches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
