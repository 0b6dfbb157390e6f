"""`python -m research family`: compare drafters under identical conditions, see `command.py`."""
