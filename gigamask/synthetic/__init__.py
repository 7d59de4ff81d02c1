"""Synthetic scenes in SA-1B's format, with masks and text queries."""
