"""Training: one step, the loop, data, checkpoints, diagnosis."""
