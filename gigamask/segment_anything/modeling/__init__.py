"""The modules of a SAM, as in Meta's `segment_anything.modeling`."""

from gigamask.models.mask_decoder import MaskDecoder
from gigamask.models.prompt_encoder import PromptEncoder
from gigamask.models.sam.image_encoder import ImageEncoderViT
from gigamask.models.sam.sam import Sam
from gigamask.models.transformer import TwoWayTransformer
from gigamask.segment_anything.modeling import (
    common,
    image_encoder,
    mask_decoder,
    prompt_encoder,
    sam,
    transformer,
)

__all__ = [
    "ImageEncoderViT",
    "MaskDecoder",
    "PromptEncoder",
    "Sam",
    "TwoWayTransformer",
    "common",
    "image_encoder",
    "mask_decoder",
    "prompt_encoder",
    "sam",
    "transformer",
]
