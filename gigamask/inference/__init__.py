"""Inference: prompting a model about an image, and generating masks of everything in it."""
