"""The classes in Meta's `segment_anything.modeling.transformer`."""

from gigamask.models.transformer import DecoderAttention as Attention
from gigamask.models.transformer import TwoWayAttentionBlock, TwoWayTransformer

__all__ = ["Attention", "TwoWayAttentionBlock", "TwoWayTransformer"]
