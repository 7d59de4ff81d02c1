"""What the Python API and the command line both call."""
