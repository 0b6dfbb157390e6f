"""`python -m medusa_jax family`: the drafters like for like, see `command.py`."""
