"""Processes, sharding, activation checkpointing, precision and profiling ranges of a training."""
