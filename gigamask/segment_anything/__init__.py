"""The modules and names of Meta's package `segment_anything`, for programs written for it.

Import from `gigamask.segment_anything` what they import from `segment_anything`; or leave a program
as it is, and set `sys.modules["segment_anything"] = gigamask.segment_anything` before it starts.
"""

from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator
from gigamask.inference.predictor import SamPredictor
from gigamask.models.build_sam import (
    build_sam,
    build_sam_vit_b,
    build_sam_vit_h,
    build_sam_vit_l,
    sam_model_registry,
)
from gigamask.segment_anything import automatic_mask_generator, modeling, predictor, utils

__all__ = [
    "SamAutomaticMaskGenerator",
    "SamPredictor",
    "automatic_mask_generator",
    "build_sam",
    "build_sam_vit_b",
    "build_sam_vit_h",
    "build_sam_vit_l",
    "modeling",
    "predictor",
    "sam_model_registry",
    "utils",
]
