"""Drafters outside the package, loaded as `module:Class` (docs/write_a_drafter.md)."""
