"""Drafters: one file per paper, all with the contract of `drafter.py`."""
