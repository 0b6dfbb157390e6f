"""Programs compiled by vendors' compilers for accelerators that are not here."""
