"""Memory and time of samples, loader processes, planned steps and training steps."""
