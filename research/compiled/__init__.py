"""Costs and defects of compiled decode steps, by the compilers of devices that are not here."""
