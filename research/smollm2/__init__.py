"""The training text of the SmolLM2 heads."""
