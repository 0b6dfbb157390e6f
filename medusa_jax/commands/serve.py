"""`medusa serve`: a model behind OpenAI's endpoints, and a page."""

from medusa_jax.commands.flags import CommandLine
from medusa_jax.commands.serve_flags import EXAMPLES, Flags


def run(flags: Flags) -> int:
    """Serve until a signal; returns the exit status."""
    from medusa_jax.commands import serve_run  # JAX is imported here, not for --help

    return serve_run.run(flags)


main = CommandLine("medusa serve", Flags, run, EXAMPLES)
