"""The classes in Meta's `segment_anything.modeling.common`."""

from gigamask.models.layers import LayerNorm2d, MLPBlock

__all__ = ["LayerNorm2d", "MLPBlock"]
