"""Reproduction of the papers and the build of the demo; not part of the installed package.

Run from a clone: `python -m research NAME`.
"""
