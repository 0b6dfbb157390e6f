"""Serving: many requests at a time, each answered as if it were alone."""

from medusa_jax.serving.request import Delta, Ending, Handle, Request, Stopped
from medusa_jax.serving.server import Busy, Server, row_sizes

__all__ = ["Busy", "Delta", "Ending", "Handle", "Request", "Server", "Stopped", "row_sizes"]
