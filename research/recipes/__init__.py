"""`python -m research recipes`: compare training recipes, see `command.py`."""
