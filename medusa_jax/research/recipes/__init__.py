"""`python -m medusa_jax recipes`: training recipes side by side, see `command.py`."""
