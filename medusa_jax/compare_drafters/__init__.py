"""`python -m medusa_jax.compare_drafters`: the drafters like for like, see `command.py`."""
