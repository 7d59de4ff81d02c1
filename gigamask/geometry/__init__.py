"""Pixels and their geometry: masks as run lengths, the one transform between image and input, distances to a boundary."""
