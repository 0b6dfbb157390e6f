"""The next command from a model to a faster server, as a line to copy.

distill -> train -> calibrate -> decode --compare -> convert or serve
"""

import shlex

from medusa_jax.console import inform

PROGRAM = "python -m medusa_jax"


def print_next(command: str, program: str = PROGRAM, **flags: str | None) -> None:
    """Print "next: python -m medusa_jax decode --model m --compare", without flags that are None.

    An empty value is a flag without one.
    """
    from medusa_jax import hosts  # here, not for --help

    words = [program, command] if command else [program]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", shlex.quote(value)] if value else [f"--{name}"]
    if hosts.first():
        inform(f"next: {' '.join(words)}")
