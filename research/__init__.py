"""What reproduces the papers and builds the demo; not part of the installed package.

Run from a clone: `python -m research NAME`.
"""
