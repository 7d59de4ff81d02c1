"""The classes in Meta's `segment_anything.modeling.mask_decoder`."""

from gigamask.models.layers import MLP
from gigamask.models.mask_decoder import MaskDecoder

__all__ = ["MLP", "MaskDecoder"]
