"""`medusa COMMAND`: the commands of the package, by name; `python -m medusa_jax` is the same."""

import sys
from collections.abc import Sequence

from medusa_jax.commands.by_name import Command, run_named


def _command(group: str, name: str, what: str) -> dict[str, Command]:
    return {name: Command(group, f"medusa_jax.commands.{name}", what)}


COMMANDS: dict[str, Command] = {
    **_command("use", "decode", "generate, stream, chat, compare with plain decoding"),
    **_command("use", "serve", "an OpenAI-compatible port for many requests, and a page"),
    **_command("use", "convert", "heads from and to the layouts of other engines"),
    **_command("use", "verify", "whether heads answer as their certificate records"),
    **_command("train", "own", "distill, train, calibrate and compare, in one command"),
    **_command("train", "train", "train backbones and heads"),
    **_command("train", "distill", "let a model write the text that its heads learn from"),
    **_command("train", "calibrate", "fit the tree to heads and device"),
    **_command("measure", "bench", "compare drafters and trees with plain decoding"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `medusa`; returns the exit status."""
    return run_named("medusa", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
