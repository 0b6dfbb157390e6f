"""`python -m medusa_jax bench WHAT`: interleaved measurements, one subcommand for each table."""

import sys
from collections.abc import Sequence

from medusa_jax.console import Command, run_named


def _table(group: str, name: str, what: str) -> dict[str, Command]:
    return {name: Command(group, f"medusa_jax.commands.bench_{name}", what)}


COMMANDS: dict[str, Command] = {
    **_table("one race", "race", "drafters and trees with plain decoding"),
    **_table("files", "questions", "a published question file, all turns, by category"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_named("python -m medusa_jax bench", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
