"""`python train.py --config=FILE --workdir=DIR [--config.field=value ...]`."""

import argparse
import dataclasses
import importlib.util
import os
import shlex
import signal
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

from medusa_jax.commands.flags import HostFlags, Parser, flag, given_hosts, parser_of
from medusa_jax.config import Config
from medusa_jax.console import (
    inform,
    run_main,
    use_compilation_cache,
    warn_if_accelerator_unused,
)
from medusa_jax.errors import UserError, did_you_mean, nearest

EXAMPLES = """\
any field of the configuration:
  --config.optim.lr=1e-3 --config.mesh=1,4,2
  --config.data.preview      print one training sample, its counted tokens marked
  --config.dry_run           print sizes and stored memory, then compile the step from shapes alone and print
                             memory, the chips it fits and traffic; =counted does not compile

Run again with the same --workdir, a training resumes."""
# Other trainers' names for fields.
ALIASES = {
    "learning_rate": "optim.lr",
    "lr_scheduler_type": "optim.schedule",
    "optimizer": "optim.name",
    "num_train_epochs": "train.epochs",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.accumulation",
    "max_seq_length": "data.seq_len",
    "dataset": "data.source",
    "model_name_or_path": "model.path",
    "bf16": "train.dtype",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(HostFlags):
    """Train by a configuration."""

    config: str | None = flag("a file with get_config() -> medusa_jax.config.Config", None)
    workdir: str | None = flag(
        "checkpoints/, log.jsonl, tensorboard/, best/ and export/ go there", None
    )
    devices: int | None = flag("simulated devices of a dry run", None, metavar="N")


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input is one line on stderr and exit status 2."""
    args = sys.argv[1:] if argv is None else argv

    def go() -> int:
        if not args:
            parser_of(Flags, "train.py", EXAMPLES).print_help()
            return 2
        flags, cfg = parse_all(args)
        from medusa_jax import hosts  # here, not for --help

        if flags.devices is not None:
            from medusa_jax.sharding import simulate_devices

            if not cfg.dry_run or flags.devices < 1:
                raise UserError(
                    "--devices simulates 1 or more devices for --config.dry_run"
                )
            simulate_devices(flags.devices)
        hosts.join(given_hosts(flags))
        with hosts.fail_together():
            try:
                status = run(cfg)
            except KeyboardInterrupt:
                if cfg.dry_run or cfg.data.preview:
                    raise
                status = 128 + signal.SIGINT
                inform(f"stopped at once; {last_checkpoint(cfg.workdir)}")
            if status and hosts.first():
                script = sys.argv[0] if sys.argv[0].endswith("train.py") else ""
                inform(
                    f"to go on: python {script or '-m medusa_jax train'} {shlex.join(args)}"
                )
            return status

    return run_main(go)


def run(cfg: Config) -> int:
    """Train, or with `dry_run` only compile, or with `data.preview` only show a sample.

    Returns: the exit status; of a training that a signal stopped, 128 + the signal's number.
    """
    from medusa_jax.training import checks, dry
    from medusa_jax.training.data.preview import preview
    from medusa_jax.training.trainer import train

    checks.check(cfg)
    if cfg.data.preview:
        preview(cfg)
        return 0
    warn_if_accelerator_unused()
    if cfg.dry_run:
        dry.dry_run(cfg)
        return 0
    use_compilation_cache()  # a resumed run starts at once
    stopped = train(cfg).get("stopped")
    return 128 + stopped if stopped else 0


def last_checkpoint(workdir: str) -> str:
    """The checkpoint that a resumed run starts from: "the last checkpoint is of step 40"."""
    directory = os.path.join(workdir, "checkpoints")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = [int(name) for name in names if name.isdigit()]
    return f"the last checkpoint is of step {max(steps)}" if steps else "no checkpoint yet"


def parse(args: list[str]) -> Config:
    """Command line -> configuration; raises as `parse_all`."""
    return parse_all(args)[1]


def parse_all(args: list[str]) -> tuple[Flags, Config]:
    """Command line -> the flags and the configuration.

    Raises:
      UserError: an unknown flag or field (the nearest one is named), or a value of another type.
    """
    found, rest = parser_of(Flags, "train.py", EXAMPLES).parse_known_args(args)
    flags = Flags(**vars(found))
    cfg = Config() if flags.config is None else load_config(flags.config)
    for path, value in vars(fields_parser(cfg).parse_args(rest)).items():
        override(cfg, path, value)
    if flags.config is None:
        raise UserError(
            "--config=FILE.py is missing, e.g. --config=configs/demo_backbone.py"
        )
    cfg.workdir = flags.workdir or cfg.workdir
    if not cfg.workdir and not cfg.dry_run and not cfg.data.preview:
        raise UserError("--workdir=DIR is missing: where checkpoints and results go")
    cfg.workdir = os.path.abspath(cfg.workdir)
    return flags, cfg


def load_config(path: str) -> Config:
    """Run `get_config()` of a Python file."""
    folder, name = os.path.split(path)
    if not os.path.isfile(path):
        there = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise UserError(f"there is no configuration file {path}{did_you_mean(name, there)}")
    spec = importlib.util.spec_from_file_location("medusa_jax_config", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A configuration may build on another one: `from configs.base import get_config`.
    root = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    try:
        sys.path.insert(0, root)
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(root)
        cfg = module.get_config()
    except Exception as error:
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if not isinstance(cfg, Config):
        raise UserError(f"get_config() in {path} must return a medusa_jax.config.Config")
    return cfg


def fields_of(owner: Any, path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Dotted names of all fields ("optim.lr"), with the dataclass and the name in it."""
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields_of(value, f"{path}{field.name}.")
        else:
            yield f"{path}{field.name}", owner, field.name


def fields_parser(cfg: Config) -> Parser:
    """A parser with a flag --config.FIELD for each field; a bool needs no value."""
    parser = Parser("train.py", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    by_last = {}
    for path, owner, name in reversed([*fields_of(cfg)]):
        kind = typing.get_type_hints(type(owner))[name]
        by_last[name] = path
        switch = {"nargs": "?", "const": True} if True in values_of(kind) else {}
        parser.add_argument(f"--config.{path}", dest=path, type=reader(kind), **switch)  # type: ignore[arg-type]

    def near(flag: str) -> str:
        asked = flag.removeprefix("--").removeprefix("config.").replace("-", "_")
        last = asked.split(".")[-1]
        found = ALIASES.get(last) or by_last.get(last) or nearest(asked, by_last.values())
        found = found or by_last.get(nearest(last, by_last), "")
        return found and f"; did you mean --config.{found}?"

    parser.nearest = near  # type: ignore[method-assign]
    return parser


def values_of(kind: Any) -> tuple[object, ...]:
    """All values of a type that has few, else ()."""
    few = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return (False, True) if kind is bool else few


def reader(kind: Any) -> Callable[[str], Any]:
    """Reads text as a bool, int, float, str, a tuple of ints or one of a few values."""

    def read(text: str) -> Any:
        if few := values_of(kind):
            known = {str(x).lower(): x for x in few} | {"1": True, "0": False}
            if text.lower() not in known:
                raise ValueError
            return known[text.lower()]
        if typing.get_origin(kind) is tuple:
            parts = tuple(int(x) for x in text.strip("()[] ").split(","))
            if len(parts) != len(typing.get_args(kind)):
                raise ValueError
            return parts
        return kind(text)

    read.__name__ = getattr(kind, "__name__", str(kind))  # for messages
    return read


def override(cfg: Config, path: str, value: Any) -> None:
    """Set the field at `path` ("optim.lr").

    Raises:
      KeyError: the configuration has no such field.
    """
    owner, name = {p: (owner, name) for p, owner, name in fields_of(cfg)}[path]
    setattr(owner, name, value)


if __name__ == "__main__":
    sys.exit(main())
