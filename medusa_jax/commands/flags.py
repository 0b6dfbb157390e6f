"""Flags that several commands share, said once."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from medusa_jax.console import inform, run_main
from medusa_jax.errors import UserError, did_you_mean

DTYPES = ("float64", "float32", "bfloat16", "float16")
WEIGHTS = ("stored", "float32", "bfloat16", "int8")
DRAFT_WEIGHTS = WEIGHTS[1:]


# What other programs call flags that exist here.
ALIASES = {
    "--max_tokens": "--max_new_tokens",
    "--max_length": "--max_new_tokens",
    "--n_predict": "--max_new_tokens",
    "--input": "--prompt",
    "--text": "--prompt",
    "--draft_model": "--drafter",
    "--temp": "--temperature",
}

# A command's flags: a frozen dataclass.
Parsed = TypeVar("Parsed")


class Parser(argparse.ArgumentParser):
    """Bad flags are one line and exit status 2; a misspelt one comes with the nearest name."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all of `args`; an argument that is no flag ends the program."""
        found, rest = self.parse_known_args(args, namespace)
        if flag := next((word for word in rest if word.startswith("-")), ""):
            name = flag.partition("=")[0]
            known = self._option_string_actions
            aliases = {a: b for a, b in ALIASES.items() if b in known}
            self.error(f"unknown flag {name}{did_you_mean(name, known, aliases)}")
        if rest:
            self.error(
                f"unexpected argument {rest[0]!r}: what a flag takes follows its name"
            )
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            problem = f"{value!r} is none of {', '.join(known)}{did_you_mean(value, known)}"
            raise argparse.ArgumentError(action, problem)

    def print_help(self, file: Any = None) -> None:
        """Print the help; unlike argparse's own, a file that cannot take it is an error."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        inform(f"error: {message} (--help lists all flags)")
        self.exit(2)


def command(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with examples to copy."""
    return Parser(
        prog=name,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_model(p: argparse.ArgumentParser, drafter: str = "") -> None:
    """--model, --drafter, whose default may be given, and the flags of `add_base`."""
    p.add_argument(
        "--model",
        help="directory, .gguf file, hub id or name (smollm2) of a model (default: the demo)",
    )
    default = drafter or "hydra for the demo, what a name brings, none for another model"
    p.add_argument(
        "--drafter",
        default=drafter or None,
        help="a name, a directory, file or hub id with heads, prompt_lookup, lookahead, "
        f"draft_model or draft_model:PATH, or none (default: {default})",
    )
    add_base(p)


def add_base(p: argparse.ArgumentParser) -> None:
    """--dtype, --weights, --draft_weights and --allow_other_base."""
    p.add_argument(
        "--dtype", choices=DTYPES, help="default: float32 on CPU, bfloat16 elsewhere"
    )
    p.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="type to read kernels in: those of a GGUF file as stored, which changes no bit of the "
        "text, or unpacked to float32; bfloat16 and int8 round the model (default: stored for a GGUF "
        "file on a CPU with native products, else the dtype)",
    )
    p.add_argument(
        "--draft_weights",
        choices=DRAFT_WEIGHTS,
        help="type to store kernels of draft heads in (default: int8 on a CPU with native "
        "products while only speed depends on it; else, and for typical and rejection, as --weights)",
    )
    p.add_argument(
        "--allow_other_base",
        action="store_true",
        help="use heads that were trained on another model of the same sizes",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseFlags:
    """--model, the flags of `add_base`, and --no_repeat_ngram_size."""

    model: str | None
    dtype: str | None
    weights: str | None
    draft_weights: str | None
    allow_other_base: bool
    no_repeat_ngram_size: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(BaseFlags):
    """The flags of `add_model`."""

    drafter: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationFlags:
    """The flags of `add_generation`, less --no_repeat_ngram_size."""

    max_new_tokens: int
    temperature: float
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFlags:
    """The flags of `add_hosts`."""

    coordinator_address: str | None
    num_processes: str | None
    process_id: str | None


def load_model(
    flags: BaseFlags,
    drafter: str | None = None,
    *,
    needs_heads: bool = False,
    **more: Any,
) -> Any:
    """The model that the flags ask for, with --drafter if no other is given.

    Args:
      needs_heads: refuse plain decoding, which the command could do nothing with.
      more: what else `load` takes, such as `tree`.
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
    given = {
        field.name: getattr(flags, field.name) for field in dataclasses.fields(BaseFlags)
    }
    model = load(given.pop("model"), name, **given, **more)
    if wanted is None and name == "none":
        inform("no --drafter is given: plain decoding, without drafts")
    return model


def add_prompts(
    p: argparse.ArgumentParser, limit: int, what: str = "", required: bool = True
) -> None:
    """--prompts and --limit."""
    p.add_argument(
        "--prompts", required=required, help=what or "JSONL with prompt or prompt_ids"
    )
    add_limit(p, limit)


def add_limit(p: argparse.ArgumentParser, limit: int) -> None:
    """--limit: how many prompts of the file to use."""
    shown = f"default: {limit}" if limit else "default: all"
    p.add_argument(
        "--limit", type=at_least(0), default=limit, help=f"most prompts to use ({shown})"
    )


def at_least(least: int) -> Callable[[str], int]:
    """The type of a flag of whole numbers from `least` on."""

    def number(text: str) -> int:
        if (given := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{least} or more, not {given}")
        return given

    number.__name__ = "int"  # what argparse calls it where the text is no number
    return number


def add_generation(p: argparse.ArgumentParser, temperature: float | None = 0.0) -> None:
    """--max_new_tokens, --temperature, --seed and --no_repeat_ngram_size.

    Args:
      temperature: the default; None leaves it to the model's name.
    """
    default = "what a model's name brings, else 0" if temperature is None else temperature
    p.add_argument("--max_new_tokens", type=int, default=200)
    p.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        help=f"0 is greedy (default: {default})",
    )
    p.add_argument("--seed", type=int, default=0)
    add_no_repeat(p)


def generation_options(flags: GenerationFlags, **more: Any) -> Any:
    """The `Options` that the flags of `add_generation` ask for, and `more` of its fields."""
    from medusa_jax.api import Options

    return Options(
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        seed=flags.seed,
        **more,
    )


def add_no_repeat(p: argparse.ArgumentParser) -> None:
    """--no_repeat_ngram_size."""
    p.add_argument(
        "--no_repeat_ngram_size",
        type=int,
        metavar="N",
        help="no N tokens in a row twice in prompt and text; 0 is off (default: what the "
        "model's generation_config.json says)",
    )


def file_to_write(path: str, flag: str) -> Path:
    """Where a result goes, made sure of before the work that leads to it.

    Raises:
      UserError: it is a directory.
    """
    file = Path(path)
    if file.is_dir():
        raise UserError(f"{flag} {path} is a directory: name a file")
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def numbers(text: str, flag: str, kind: Callable = int, least: float | None = None) -> list:
    """ "1,4,8" -> [1, 4, 8].

    Raises:
      UserError: not a list of numbers, or of smaller ones than `least`; names the flag.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{flag} is a list like 1,4,8, not {text!r}") from error
    if least is not None and min(found) < least:
        raise UserError(f"{flag} are {least} or more, not {text!r}")
    return found


def token_ids(text: str, flag: str) -> tuple[int, ...]:
    """ "13,13" -> (13, 13), "none" -> ().

    Raises:
      UserError: anything else; names the flag.
    """
    return () if text == "none" else tuple(numbers(text, flag))


def parse_mesh(text: str) -> tuple[int, ...]:
    """ "1,2,4" -> (1, 2, 4)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--mesh is three numbers like 1,2,4, not {text!r}") from error


def add_hosts(p: argparse.ArgumentParser) -> None:
    """--coordinator_address, --num_processes and --process_id."""
    several = p.add_argument_group(
        "several hosts",
        "the same command on each; SLURM, Open MPI, Cloud TPU and GKE say who they are, elsewhere "
        "give all three",
    )
    several.add_argument("--coordinator_address", metavar="HOST:PORT", help="process 0's")
    several.add_argument("--num_processes", metavar="N")
    several.add_argument("--process_id", metavar="I", help="from 0")


def given_hosts(flags: HostFlags) -> dict[str, str]:
    """The flags of `add_hosts` that were given."""
    values = {f.name: getattr(flags, f.name) for f in dataclasses.fields(HostFlags)}
    return {name: value for name, value in values.items() if value is not None}


Hosted = TypeVar("Hosted", bound=HostFlags)


def on_hosts(run: Callable[[Hosted], int]) -> Callable[[Hosted], int]:
    """`run` in every process of a run over several hosts; process 0 alone prints."""

    def in_each(flags: Hosted) -> int:
        from medusa_jax import hosts  # here, not for --help

        hosts.join(given_hosts(flags))
        with hosts.fail_together(), hosts.one_prints():
            return run(flags)

    return in_each


def typed(kind: type[Parsed], flags: argparse.Namespace) -> Parsed:
    """The dataclass `kind` with the values of the flags that have its fields' names."""
    names = (field.name for field in dataclasses.fields(kind) if field.init)  # type: ignore[arg-type]
    return kind(**{name: getattr(flags, name) for name in names})


def run_command(
    parser: argparse.ArgumentParser,
    kind: type[Parsed],
    run: Callable[[Parsed], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse, and run with the parsed flags as a `kind`; bad input is one line and exit status 2."""
    return run_main(lambda: run(typed(kind, parser.parse_args(argv))))
