"""Trained models in the formats of others; whatever is written is read back by who it is for, and held against the model."""
