"""`python -m medusa_jax.study`: training recipes side by side, see `command.py`."""
