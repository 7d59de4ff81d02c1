"""The class in Meta's `segment_anything.predictor`."""

from gigamask.inference.predictor import SamPredictor

__all__ = ["SamPredictor"]
