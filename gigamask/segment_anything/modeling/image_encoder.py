"""The classes and functions in Meta's `segment_anything.modeling.image_encoder`."""

from gigamask.models.layers import PatchEmbed
from gigamask.models.sam.image_encoder import EncoderAttention as Attention
from gigamask.models.sam.image_encoder import EncoderBlock as Block
from gigamask.models.sam.image_encoder import ImageEncoderViT, window_partition, window_unpartition

__all__ = [
    "Attention",
    "Block",
    "ImageEncoderViT",
    "PatchEmbed",
    "window_partition",
    "window_unpartition",
]
