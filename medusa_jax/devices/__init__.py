"""Devices: peaks of named chips, platforms and their compile options."""
