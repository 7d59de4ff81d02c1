"""Training: one loop and one step for every task, the state they carry, and the checkpoints that hold it."""
