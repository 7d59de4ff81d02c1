"""The class in Meta's `segment_anything.utils.transforms`."""

from gigamask.inference.resize_longest_side import ResizeLongestSide

__all__ = ["ResizeLongestSide"]
