"""`python -m medusa_jax COMMAND`: every command of the project, by name. Installed: `medusa`."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from medusa_jax.console import inform, run_main
from medusa_jax.errors import did_you_mean


class Command(NamedTuple):
    """One command.

    Attributes:
      group: its heading in the list.
      module: has `main(argv)`, which returns the exit status.
      what: what it does, one line.
    """

    group: str
    module: str
    what: str


def _command(group: str, name: str, what: str) -> dict[str, Command]:
    return {name: Command(group, f"medusa_jax.commands.{name}", what)}


COMMANDS: dict[str, Command] = {
    **_command("use", "decode", "generate, stream, chat, compare with plain decoding"),
    **_command("use", "serve", "an OpenAI-compatible port for many requests, and a page"),
    **_command("use", "convert", "heads from and to the layouts of other engines"),
    **_command("train", "train", "train backbones and heads"),
    **_command("train", "distill", "let a model write the text that its heads learn from"),
    **_command("train", "calibrate", "fit the tree to heads and device"),
    **_command("measure", "bench", "compare drafters and trees with plain decoding"),
    **_command("measure", "replay", "accepted lengths on a question file, without timings"),
    **_command("measure", "sweep", "acceptance rules over threshold and temperature"),
    **_command("measure", "ties", "where low precision leaves plain decoding, and why"),
    **_command("measure", "roofline", "the speed-up that a chip allows, by tree size"),
    **_command("measure", "compile", "what a TPU's or GPU's compiler makes of a step"),
}


def listing(prog: str, commands: Mapping[str, Command]) -> str:
    """All commands under the headings of their groups."""
    width = max(map(len, commands))
    lines = [f"usage: {prog} COMMAND [flags]   (COMMAND --help says more)"]
    for group in dict.fromkeys(command.group for command in commands.values()):
        lines += ["", f"{group}:"]
        lines += [
            f"  {name:{width}}  {c.what}"
            for name, c in commands.items()
            if c.group == group
        ]
    return "\n".join(lines)


def run(
    prog: str, commands: Mapping[str, Command], argv: Sequence[str] | None = None
) -> int:
    """Run the command that the first argument names; returns its exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    return run_main(lambda: dispatch(prog, commands, args))


def dispatch(prog: str, commands: Mapping[str, Command], args: list[str]) -> int:
    """As `run`, without its care for standard streams and missing packages."""
    if not args or args[0] in ("-h", "--help"):
        print(listing(prog, commands))
        return 0 if args else 2
    name = args[0]
    if name not in commands:
        near = did_you_mean(name, commands) or " (--help lists all)"
        inform(f"error: unknown command {name!r}{near}")
        return 2
    status: int = importlib.import_module(commands[name].module).main(args[1:])
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m medusa_jax`."""
    return run("python -m medusa_jax", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
