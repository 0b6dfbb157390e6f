"""The backbone and its key/value cache."""
