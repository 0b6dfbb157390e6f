"""Command-line flags: each is a field of a frozen dataclass, declared once with its help.

`class Flags(GenerationFlags, ModelFlags)` has the flags of both and adds its own by `flag`. A field that only
gets another default keeps its help. In --help the flags of a base class are a group under its docstring.
"""

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from medusa_jax.arch import ACTIVATIONS, DRAFT_WEIGHTS, DTYPES, WEIGHTS
from medusa_jax.console import entries, inform, run_main
from medusa_jax.errors import UserError, did_you_mean

if TYPE_CHECKING:  # commands import JAX when they run, not for --help
    from medusa_jax.api import Model, Options

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
        """Parse all of `args`."""
        found, rest = self.parse_known_args(args, namespace)
        if flag := next((word for word in rest if word.startswith("-")), ""):
            name = flag.partition("=")[0]
            self.error(f"unknown flag {name}{self.near(name)}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}: values follow a flag's name")
        return found

    def near(self, name: str) -> str:
        """The end of the message about an unknown flag: the one that was meant, if any is near."""
        return did_you_mean(name, self.names)

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError`."""
        raise UserError(f"{message} (see --help)")


def flag(help: str, default: Any = dataclasses.MISSING, **how: Any) -> Any:
    """A field of a command's flags; without a default it must be given.

    Its type is the field's: a bool needs no value, a list may be given several times.

    Args:
      help: text for --help; the default is added unless it is None, False, empty or mentioned.
      how: further arguments of argparse's `add_argument`.
    """
    made = {"default": default}
    if isinstance(default, list):
        made = {"default_factory": default.copy}
    return dataclasses.field(metadata={"help": help} | how, **made)


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
        described = (getattr(b, FIELDS)[field.name].metadata for b in owners)
        how = _kind_of_flag(kinds[field.name]) | dict(next(filter(None, described)))
        if field.default_factory is not dataclasses.MISSING:
            how["default"] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            how["default"] = field.default
        else:
            how["required"] = True
        own = how.get("default")
        if own is not False and own not in (None, "", []) and "default" not in how["help"]:
            how["help"] += " (default: %(default)s)"
        names.append(how.pop("name", f"--{field.name}"))
        groups[owners[len(owners) > 1]].add_argument(names[-1], dest=field.name, **how)
    parser.names = names
    return parser


def _kind_of_flag(kind: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a field of this type."""
    if kind is bool:
        return {"action": "store_true"}
    if typing.get_origin(kind) is list:
        return {"action": "append"}
    [kind, *_] = typing.get_args(kind) or [kind]  # of X | None the first
    return {} if kind is str else {"type": kind}


@dataclasses.dataclass(frozen=True)
class Program(Generic[Parsed]):
    """A command: call it with arguments, and it returns the exit status.

    Attributes:
      name: as it is typed.
      kind: its flags, a dataclass whose docstring describes the command.
      run: takes the flags and returns the exit status.
      examples: calls to copy, for the end of its help.
    """

    name: str
    kind: type[Parsed]
    run: Callable[[Parsed], int]
    examples: str = ""

    def parse(self, argv: Sequence[str] | None = None) -> Parsed:
        """The flags of a command line.

        Raises:
          UserError: an unknown flag, or a bad value.
        """
        parser = parser_of(self.kind, self.name, self.examples)
        return self.kind(**vars(parser.parse_args(argv)))

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parse, and run; bad input is one line and exit status 2."""
        return run_main(lambda: self.run(self.parse(argv)))


def at_least(
    least: float, kind: Callable[[str], Any] = int, most: float = 2**31 - 1
) -> Callable[[str], Any]:
    """The type of a flag with numbers from `least` to `most`."""

    def number(text: str) -> Any:
        if not least <= (given := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"from {least} to {most}, not {given}")
        return given

    number.__name__ = kind.__name__  # argparse's word for it where the text is not a number
    return number


def numbers(
    kind: Callable[[str], Any] = int, least: float = -(2**31), most: float = 2**31 - 1
) -> Callable[[str], tuple[Any, ...]]:
    """The type of a flag such as "1,4,8", with numbers as for `at_least`; "none" is ()."""

    def read(text: str) -> tuple[Any, ...]:
        if text == "none":
            return ()
        with suppress(ValueError):
            if found := tuple(map(at_least(least, kind, most), entries(text))):
                return found
        raise argparse.ArgumentTypeError(f"a list like 1,4,8, not {text!r}")

    return read


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseFlags:
    """The model."""

    model: str | None = flag(
        "directory, .gguf file, hub id or name (smollm2) of a model (default: the demo)",
        None,
    )
    dtype: str | None = flag(
        "type to compute in (default: float32 on CPU, bfloat16 elsewhere)",
        None,
        choices=DTYPES,
    )
    weights: str | None = flag(
        "type to read kernels in: those of a GGUF file as stored, multiplied by integers (see "
        "--activations), or unpacked to float32; bfloat16 and int8 round the model (default: stored for a GGUF file on a "
        "CPU with native products, else the dtype)",
        None,
        choices=WEIGHTS,
    )
    draft_weights: str | None = flag(
        "type to store kernels of draft heads in (default: int8 on a CPU with native products while "
        "only speed depends on it; else, and for typical and rejection, as --weights)",
        None,
        choices=DRAFT_WEIGHTS,
    )
    activations: int = flag(
        "bits of the activations that stored and int8 weights are multiplied by on a CPU; 8 is "
        "llama.cpp's precision",
        16,
        choices=ACTIVATIONS,
    )
    allow_other_base: bool = flag(
        "use heads that were trained on another model of the same sizes", False
    )
    no_repeat_ngram_size: int | None = flag(
        "no N tokens in a row twice in prompt and text; 0 is off (default: that of the model's "
        "generation_config.json)",
        None,
        metavar="N",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(BaseFlags):
    """The model and its drafter."""

    drafter: str | None = flag(
        "a name, a directory, file or hub id with heads, prompt_lookup, draft_model or draft_model:PATH, "
        "module:Class or module:Class:PATH of a drafter of yours, or none (default: hydra for the demo, heads that come with a name, none for another "
        "model)",
        None,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFlags:
    """The devices that a model is spread over."""

    mesh: tuple[int, ...] = flag("devices along data,fsdp,tensor", "1,1,1", type=numbers())


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationFlags:
    """The length of a text, and how it is drawn."""

    max_new_tokens: int = flag("most tokens of a text", 200)
    temperature: float = flag("0 is greedy", 0.0)
    seed: int = flag("of the draws", 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFlags:
    """Several hosts: the same command on each. SLURM, Open MPI, Cloud TPU and GKE set all three."""

    coordinator_address: str | None = flag("process 0's", None, metavar="HOST:PORT")
    num_processes: str | None = flag("of all hosts", None, metavar="N")
    process_id: str | None = flag("from 0", None, metavar="I")


def load_model(
    flags: BaseFlags, drafter: str | None = None, *, needs_heads: bool = False, **more: Any
) -> "Model":
    """The model that the flags ask for, with --drafter if no other is given.

    Args:
      needs_heads: refuse plain decoding.
      more: further arguments of `load`, such as `tree`.
    """
    import jax  # here, not for --help

    from medusa_jax.api import default_drafter, load

    wanted = drafter or (flags.drafter if isinstance(flags, ModelFlags) else None)
    name = wanted or default_drafter(flags.model)
    if needs_heads and name == "none":
        whose = flags.model or "the demo"
        raise UserError(f"give --drafter the directory or hub id of heads for {whose}")
    if flags.dtype == "float64":  # a switch of the whole process
        jax.config.update("jax_enable_x64", True)
    given = _part(flags, BaseFlags)
    if isinstance(flags, MeshFlags):
        given["mesh"] = flags.mesh
    model = load(given.pop("model"), name, **given | more)
    if wanted is None and name == "none":
        inform("no --drafter is given: plain decoding, without drafts")
    return model


def generation_options(flags: GenerationFlags, **more: Any) -> "Options":
    """The `Options` that the flags ask for, and `more` of its fields."""
    from medusa_jax.api import Options

    return Options(**_part(flags, GenerationFlags), **more)


def _part(flags: Any, kind: type) -> dict[str, Any]:
    """The values of the fields of `kind`, a base class of the flags."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind)}


def file_to_write(path: str, flag: str) -> Path:
    """A result's file, checked before the work that leads to it.

    Raises:
      UserError: it is a directory, or a file of a model.
    """
    from medusa_jax.files.hub import refuse_model  # here, not for --help

    file = Path(path)
    if file.is_dir():
        raise UserError(f"{flag} {path} is a directory: name a file")
    refuse_model(path, flag)
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


Hosted = TypeVar("Hosted", bound=HostFlags)


def on_hosts(run: Callable[[Hosted], int]) -> Callable[[Hosted], int]:
    """`run` in every process of a run over several hosts; process 0 alone prints."""

    def in_each(flags: Hosted) -> int:
        from medusa_jax import hosts  # here, not for --help

        hosts.join(given_hosts(flags))
        with hosts.fail_together(), hosts.one_prints():
            return run(flags)

    return in_each


def given_hosts(flags: HostFlags) -> dict[str, str]:
    """The `HostFlags` that were given."""
    given = _part(flags, HostFlags)
    return {name: value for name, value in given.items() if value is not None}
