"""Decoding: acceptance rules, the decode step, and what runs it: `generation`, `constrained`, the server's `Batch`."""
