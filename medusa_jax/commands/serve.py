"""`python -m medusa_jax serve`, `medusa-serve`: a model behind OpenAI's endpoints, and a page."""

import sys
from collections.abc import Sequence

from medusa_jax.commands.flags import run_command
from medusa_jax.commands.serve_flags import Flags, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""

    def run(flags: Flags) -> int:
        from medusa_jax.commands import serve_run  # JAX is imported here, not for --help

        return serve_run.run(flags)

    return run_command(parser(), Flags, run, argv)


if __name__ == "__main__":
    sys.exit(main())
