"""Commands by name: their list, and the call of one."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from medusa_jax.commands.entry import run_main
from medusa_jax.errors import UserError, did_you_mean


class Command(NamedTuple):
    """One command.

    Attributes:
      group: its heading in the list.
      module: has `main(argv)`, which returns the exit status: in `commands/` the `CommandLine` of its `run(flags)`.
      what: a description in one line.
    """

    group: str
    module: str
    what: str


def listing(prog: str, commands: Mapping[str, Command]) -> str:
    """All commands under the headings of their groups."""
    width = max(map(len, commands))
    lines = [f"usage: {prog} COMMAND [flags]   (COMMAND --help lists its flags)"]
    for group in dict.fromkeys(command.group for command in commands.values()):
        lines += ["", f"{group}:"]
        for name, command in commands.items():
            if command.group == group:
                lines.append(f"  {name:{width}}  {command.what}")
    return "\n".join(lines)


def run_named(
    prog: str, commands: Mapping[str, Command], argv: Sequence[str] | None = None
) -> int:
    """Run the command that the first argument names; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)

    def run() -> int:
        if not words or words[0] in ("-h", "--help"):
            print(listing(prog, commands))
            return 0 if words else 2
        name = words[0]
        if name not in commands:
            hint = did_you_mean(name, commands) or " (--help lists all)"
            raise UserError(f"unknown command {name!r}{hint}")
        status: int = importlib.import_module(commands[name].module).main(words[1:])
        return status

    return run_main(run)
