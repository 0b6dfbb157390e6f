"""Layouts of draft heads: this project's own, the published ones, and those that other engines load."""
