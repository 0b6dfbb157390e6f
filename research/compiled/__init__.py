"""Costs and defects of compiled steps, by the compilers of devices that need not be here."""
