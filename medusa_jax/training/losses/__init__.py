"""Losses: `pairs.py` has what counts, `objectives.py` the terms and their weights, `streamed.py` their sums, chunk by chunk."""
