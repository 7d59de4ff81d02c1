"""Grounding: which of an image's masks a text means."""
