"""Measurements of a loaded `Model`: speed, accepted lengths, divergences, trees for a device."""
