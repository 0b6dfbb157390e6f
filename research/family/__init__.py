"""`python -m research family`: the drafters like for like, see `command.py`."""
