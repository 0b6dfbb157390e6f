"""Devices: peaks of named chips, the platform, this machine, and launchers of several processes."""
