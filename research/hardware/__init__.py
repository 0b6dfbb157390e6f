"""Checks of an accelerator that take minutes: correctness, steps of a 7B model, training."""
