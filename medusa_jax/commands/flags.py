"""Command-line flags: each is a field of a frozen dataclass, declared once with its help.

`class Flags(GenerationFlags, ModelFlags)` has the flags of both and adds its own by `flag`. A field that only
gets another default keeps its help. In --help the flags of a base class are a group under its docstring.
"""

import argparse
import dataclasses
import inspect
import os
import shlex
import sys
import tempfile
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from medusa_jax.commands.entry import run_main
from medusa_jax.devices.launchers import is_alone
from medusa_jax.errors import UserError, did_you_mean
from medusa_jax.notation import entries

FIELDS = "__dataclass_fields__"
# A command's flags: a frozen dataclass.
Parsed = TypeVar("Parsed")


class Parser(argparse.ArgumentParser):
    """Raises `UserError` for bad flags, with the nearest name for a misspelt one.

    Attributes:
      names: of all flags.
    """

    names: Sequence[str] = ()

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, leftovers = self.parse_known_args(args, namespace)
        for word in leftovers:
            if word.startswith("-"):
                name = word.partition("=")[0]
                self.error(f"unknown flag {name}{self.hint(name)}")
        if leftovers:
            self.error(f"unexpected argument {leftovers[0]!r}: values follow a flag's name")
        return values

    def hint(self, name: str) -> str:
        """ "; did you mean" and the nearest flag, "" if none is near."""
        return did_you_mean(name, self.names)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def flag(help: str, default: Any = dataclasses.MISSING, **how: Any) -> Any:
    """A field of a command's flags; without a default it must be given.

    Its type is the field's: a bool needs no value, a list may be given several times, a tuple of words is "a,b".

    Args:
      help: text for --help; the default is added unless it is None, False, empty or mentioned.
      how: further arguments of argparse's `add_argument`.
    """
    argument = {"default": default}
    if isinstance(default, list | dict):
        argument = {"default_factory": default.copy}
    return dataclasses.field(metadata={"help": help} | how, **argument)


def parser_of(kind: type, name: str, examples: str = "") -> Parser:
    """A parser with a flag for each field of a dataclass, which its docstring describes."""
    parser = Parser(
        prog=name,
        usage="%(prog)s [flags]",
        description=inspect.cleandoc(kind.__doc__ or ""),
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    groups: dict[type, Any] = {kind: parser}
    for base in kind.__mro__[1:]:
        groups[base] = parser.add_argument_group((base.__doc__ or "").rstrip("."))
    kinds = typing.get_type_hints(kind)
    names = []
    for field in dataclasses.fields(kind):
        owners = [b for b in kind.__mro__ if field.name in getattr(b, FIELDS, ())]
        metadata = (getattr(b, FIELDS)[field.name].metadata for b in owners)
        declared = next(filter(None, metadata), None)
        if declared is None:  # not a flag
            continue
        how = _kind_of_flag(kinds[field.name]) | dict(declared)
        if field.default_factory is not dataclasses.MISSING:
            how["default"] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            how["default"] = field.default
        else:
            how["required"] = True
        if isinstance(how.get("default"), tuple) and how["default"]:  # as it is typed
            how["default"] = ",".join(map(str, how["default"]))
        default = how.get("default")
        shown = type(default) in (int, float) or default  # also 0
        if shown and "default" not in how["help"]:
            how["help"] += " (default: %(default)s)"
        names.append(how.pop("name", f"--{field.name}"))
        if names[-1] == field.name:  # a word without a flag
            del how["required"]
        else:
            how["dest"] = field.name
        groups[owners[len(owners) > 1]].add_argument(names[-1], **how)
    parser.names = names
    return parser


def _kind_of_flag(kind: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a field of this type."""
    if kind is bool:
        return {"action": "store_true"}
    if typing.get_origin(kind) is list:
        return {"action": "append"}
    if kind == tuple[str, ...]:
        return {"type": lambda text: tuple(entries(text))}
    [kind, *_] = typing.get_args(kind) or [kind]  # of X | None the first
    return {} if kind is str else {"type": kind}


@dataclasses.dataclass(frozen=True)
class CommandLine(Generic[Parsed]):
    """A command: call it with arguments, and it returns the exit status.

    Attributes:
      name: as it is typed.
      kind: its flags, a dataclass whose docstring describes the command.
      run: takes the flags and returns the exit status.
      examples: calls to copy, for the end of its help.
      resumes: whether the same call goes on after it was stopped.
    """

    name: str
    kind: type[Parsed]
    run: Callable[[Parsed], int]
    examples: str = ""
    resumes: bool = False

    def parser(self) -> Parser:
        return parser_of(self.kind, self.name, self.examples)

    def parse(self, argv: Sequence[str] | None = None) -> Parsed:
        """The flags of a command line.

        Raises:
          UserError: an unknown flag, or a bad value.
        """
        return self.kind(**vars(self.parser().parse_args(argv)))

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parse, and run; bad input is one line and exit status 2."""
        words = sys.argv[1:] if argv is None else argv
        again = shlex.join([*self.name.split(), *words]) if self.resumes else ""
        return run_main(lambda: self._run(self.parse(words)), again)

    def _run(self, flags: Parsed) -> int:
        try:
            return self.run(flags)
        except UserError as error:
            given = {"model": "", "drafter": "", "drafters": ()} | vars(flags)
            heads = [given["drafter"] or "", *given["drafters"]]
            if given["model"] is not None or not any(map(os.path.exists, heads)):
                raise
            raise UserError(f"{error} (without --model, the model is the demo)") from error


def at_least(
    least: float, kind: Callable[[str], Any] = int, most: float = 2**31 - 1
) -> Callable[[str], Any]:
    """The type of a flag with numbers from `least` to `most`."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"from {least} to {most}, not {value}")
        return value

    number.__name__ = kind.__name__  # argparse's word for it where the text is not a number
    return number


def numbers(
    least: float = -(2**31), most: float = 2**31 - 1
) -> Callable[[str], tuple[int, ...]]:
    """The type of a flag such as "1,4,8", with numbers as for `at_least`; "none" is ()."""

    def read(text: str) -> tuple[int, ...]:
        if text == "none":
            return ()
        with suppress(ValueError):
            values = tuple(map(at_least(least, int, most), entries(text)))
            if values:
                return values
        raise argparse.ArgumentTypeError(f"a list like 1,4,8, not {text!r}")

    return read


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFlags:
    """Several hosts: the same command on each. SLURM, Open MPI, Cloud TPU and GKE set all three."""

    coordinator_address: str | None = flag("process 0's", None, metavar="HOST:PORT")
    num_processes: str | None = flag("of all hosts", None, metavar="N")
    process_id: str | None = flag("from 0", None, metavar="I")


def values_of(flags: Any, kind: type) -> dict[str, Any]:
    """The values of the fields of `kind`, a base class of the flags."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind)}


def file_to_write(path: str, flag: str) -> Path:
    """A result's file, checked before the work that leads to it.

    Raises:
      UserError: it is a directory, or a file of a model, or its directory cannot be written to.
    """
    from medusa_jax.files.not_replaced import refuse_model  # here, not for --help

    file = Path(path)
    if file.is_dir():
        raise UserError(f"{flag} {path} is a directory: name a file")
    refuse_model(path, flag)
    if not file.exists():
        make_writable(file.parent, f"{flag} {path}")
    return file


def out_directory(path: str, flag: str) -> Path:
    """A directory for results, created.

    Raises:
      UserError: it holds a model, or cannot be written to.
    """
    from medusa_jax.files.not_replaced import refuse_model  # here, not for --help

    refuse_model(path, flag)
    out = Path(path)
    make_writable(out, f"{flag} {path}")
    return out


def make_writable(directory: Path, shown: str) -> None:
    """Make a directory for results, and refuse one in which no file can be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=directory).cleanup()
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {error.strerror}") from error


Hosted = TypeVar("Hosted", bound=HostFlags)


def on_hosts(run: Callable[[Hosted], int]) -> Callable[[Hosted], int]:
    """Run in every process of a run over several hosts; only process 0 prints."""

    def in_each(flags: Hosted) -> int:
        values = values_of(flags, HostFlags)
        addresses = {name: value for name, value in values.items() if value is not None}
        if is_alone(addresses):
            return run(flags)
        from medusa_jax import hosts  # imports JAX

        hosts.join(addresses)
        with hosts.fail_together(), hosts.one_prints():
            return run(flags)

    return in_each
