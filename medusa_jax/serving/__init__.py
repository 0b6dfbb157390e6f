"""Serving: many requests at a time, each answered as if it were alone."""

from medusa_jax.serving.request import Busy, Delta, Ending, Handle, Request, Stopped
from medusa_jax.serving.server import Server, row_sizes

__all__ = ["Busy", "Delta", "Ending", "Handle", "Request", "Server", "Stopped", "row_sizes"]
