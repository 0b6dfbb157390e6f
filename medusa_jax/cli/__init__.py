"""Entry points: flags and wiring only."""
