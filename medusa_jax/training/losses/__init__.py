"""Losses. `pairs.py`: what counts; `terms.py`: terms; `objectives.py`: weights and means; `streamed.py`: sums."""
