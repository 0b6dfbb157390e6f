"""What an accelerator shows in a few minutes: correctness, steps of a 7B model, training."""
