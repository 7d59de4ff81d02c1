"""The builders of models in Meta's `segment_anything.build_sam`."""

from gigamask.models.build_sam import (
    build_sam,
    build_sam_vit_b,
    build_sam_vit_h,
    build_sam_vit_l,
    sam_model_registry,
)

__all__ = [
    "build_sam",
    "build_sam_vit_b",
    "build_sam_vit_h",
    "build_sam_vit_l",
    "sam_model_registry",
]
