"""Decoding: acceptance rules, the decode step and its two drivers."""
