"""Optimizers: rules by group of variables, schedules, AdamW with 8-bit moments."""
