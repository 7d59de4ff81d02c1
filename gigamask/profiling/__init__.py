"""What memory and time are spent on: a sample, the processes that load samples, a step that is planned, and the steps of a training."""
