"""decode.py, `python -m medusa_jax decode`: generate text with draft heads, stream it, measure it."""

import sys
from collections.abc import Sequence

from medusa_jax.commands.decode_flags import Flags, parser
from medusa_jax.commands.flags import on_hosts, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""

    def run(flags: Flags) -> int:
        from medusa_jax.commands import decode_run  # JAX is imported here, not for --help

        return decode_run.run(flags)

    return run_command(parser(), Flags, on_hosts(run), argv)


if __name__ == "__main__":
    sys.exit(main())
