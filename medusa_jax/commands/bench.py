"""`python -m medusa_jax bench WHAT`: interleaved measurements, one subcommand for each table."""

import sys
from collections.abc import Sequence

from medusa_jax.commands.by_name import Command, run_named

COMMANDS: dict[str, Command] = {
    "race": Command(
        "one race",
        "medusa_jax.commands.bench_race",
        "drafters and trees with plain decoding",
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_named("python -m medusa_jax bench", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
