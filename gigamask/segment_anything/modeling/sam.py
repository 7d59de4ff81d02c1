"""The class in Meta's `segment_anything.modeling.sam`."""

from gigamask.models.sam.sam import Sam

__all__ = ["Sam"]
