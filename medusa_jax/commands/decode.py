"""decode.py, `python -m medusa_jax decode`: generate text with draft heads, stream it, measure it."""

from medusa_jax.commands.decode_flags import EXAMPLES, Flags
from medusa_jax.commands.flags import Program, on_hosts


def run(flags: Flags) -> int:
    """Decode; returns the exit status."""
    from medusa_jax.commands import decode_run  # JAX is imported here, not for --help

    return decode_run.run(flags)


main = Program("decode.py", Flags, on_hosts(run), EXAMPLES)
