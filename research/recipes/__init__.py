"""`python -m research recipes`: training recipes side by side, see `command.py`."""
