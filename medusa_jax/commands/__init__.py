"""One file a command: flags, wiring, printing."""
