"""The modules of Meta's `segment_anything.utils` that have a counterpart here."""

from gigamask.segment_anything.utils import transforms

__all__ = ["transforms"]
