"""What memory is spent on: one sample, and the processes that load samples."""
