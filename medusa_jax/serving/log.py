"""The server's log: lines on stderr, each with the time of day."""

import time

from medusa_jax.console import inform


def log(line: str) -> None:
    """Write one line; a message of several lines is cut to the first."""
    inform(f"{time.strftime('%H:%M:%S')} {line.partition(chr(10))[0]}")
