"""The class in Meta's `segment_anything.automatic_mask_generator`."""

from gigamask.inference.automatic_mask_generator import SamAutomaticMaskGenerator

__all__ = ["SamAutomaticMaskGenerator"]
