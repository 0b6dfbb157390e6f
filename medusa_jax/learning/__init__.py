"""Heads that learn from answers while a model is used (docs/learning.md)."""
