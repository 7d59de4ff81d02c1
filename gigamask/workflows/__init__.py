"""What the Python API and the command line both call: train, plan, segment, ablate, follow, demo."""
