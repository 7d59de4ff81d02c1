"""Pixels and their geometry: masks as run lengths, the one transform between image and input, boxes, distances to a boundary."""
