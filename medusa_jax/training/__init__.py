"""Training: packed rows, chunked losses, the loop and its checkpoints."""
