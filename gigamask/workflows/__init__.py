"""Workflows shared by the Python API and the command line."""
