"""Training: data to packed rows, losses in chunks, the loop, its checkpoints."""
