"""Grounding: finding the masks of an image that a text describes."""
