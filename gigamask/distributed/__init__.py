"""Processes, sharding, activation checkpointing, precision and profiler ranges for training."""
