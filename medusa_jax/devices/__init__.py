"""Devices: peaks of named chips, platforms and their compile options, traffic of compiled programs."""
