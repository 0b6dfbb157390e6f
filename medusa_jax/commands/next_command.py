"""The next command from a model to a faster server, as a line to copy.

distill -> train -> calibrate -> decode --compare -> convert or serve
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from medusa_jax.console import inform

_silent = ContextVar("silent", default=False)


@contextmanager
def silent() -> Iterator[None]:
    """Print no next command during the block: the caller knows it."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


def print_next(command: str, **flags: str | None) -> None:
    """Print "next: medusa decode --model m --compare", without flags that are None.

    An empty value is a flag without one.
    """
    from medusa_jax import hosts  # here, not for --help

    words = ["medusa", command]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", shlex.quote(value)] if value else [f"--{name}"]
    if hosts.first() and not _silent.get():
        inform(f"next: {' '.join(words)}")
