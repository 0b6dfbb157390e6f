"""`python train.py --config=FILE --workdir=DIR [--config.field=value ...]`."""

import dataclasses
import importlib.util
import os
import shlex
import signal
import sys
import typing
from typing import Any

from medusa_jax.commands.flags import HostFlags, Parser, flag, given_hosts, parser_of, typed
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
  --config.dry_run           print sizes and counted memory, then compile the step from shapes alone and print
                             memory, traffic and the least time on known chips; =counted does not compile

Run again with the same --workdir, a training resumes."""


# Flags that name no field.
OWN = ("config", "workdir", "devices")
# What other trainers call fields that exist here.
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
    devices: str | None = flag("simulated devices of a dry run", None, metavar="N")


def main(argv: list[str] | None = None) -> int:
    """Entry point; bad input is one line on stderr and exit status 2."""
    args = sys.argv[1:] if argv is None else argv

    def go() -> int:
        if not args:
            parser().print_help()
            return 2
        flags, cfg = parse_all(args)
        from medusa_jax import hosts  # here, not for --help

        if flags.devices is not None:
            simulate(flags.devices, cfg)
        hosts.join(given_hosts(flags))
        with hosts.fail_together():
            trains = not (cfg.dry_run or cfg.data.preview)
            try:
                status = run(cfg)
            except KeyboardInterrupt:
                if not trains:
                    raise
                status = 128 + signal.SIGINT
                inform(f"stopped at once; {last_checkpoint(cfg.workdir)}")
            if status and hosts.first():
                inform(f"to go on: {same_command(args)}")
            return status

    return run_main(go)


def parser() -> Parser:
    """All flags but `--config.FIELD=VALUE`, which the configuration's fields define."""
    found = parser_of(Flags, "train.py", EXAMPLES)
    found.usage = "train.py --config=FILE.py --workdir=DIR [--config.FIELD=VALUE ...]"
    return found


def simulate(devices: str, cfg: Config) -> None:
    """Simulate the CPU devices of a dry run.

    Raises:
      UserError: it is no dry run, or no number.
    """
    from medusa_jax.sharding import simulate_devices

    if not cfg.dry_run:
        raise UserError("--devices simulates devices for --config.dry_run only")
    if not devices.isdigit() or not int(devices):
        raise UserError(f"--devices takes a number of devices, not {devices!r}")
    simulate_devices(int(devices))


def run(cfg: Config) -> int:
    """Train, or with `dry_run` only compile, or with `data.preview` only show a sample.

    Returns: the exit status, that of the signal which ended a training that is to go on.
    """
    from medusa_jax.training import checks, dry
    from medusa_jax.training.data.preview import preview
    from medusa_jax.training.trainer import train

    checks.check(cfg)
    if cfg.data.preview:
        preview(cfg)
        return 0
    warn_if_accelerator_unused()
    try:
        if cfg.dry_run:
            dry.dry_run(cfg)
            return 0
        use_compilation_cache()  # a resumed run starts at once
        stopped = train(cfg).get("stopped")
        return 128 + stopped if stopped else 0
    except UserError:  # TensorStore reports a full disk as RESOURCE_EXHAUSTED
        raise
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
            raise
        t = cfg.train
        raise UserError(
            f"out of device memory training {t.stage} on {t.batch_size // t.accumulation} x "
            f"{cfg.data.seq_len} tokens at a time in {t.dtype}: raise train.accumulation, lower "
            f"data.seq_len or train.loss_chunk, or spread over more devices (mesh)"
        ) from error


def last_checkpoint(workdir: str) -> str:
    """The checkpoint that a resumed run starts from: "the last checkpoint is of step 40"."""
    directory = os.path.join(workdir, "checkpoints")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = [int(name) for name in names if name.isdigit()]
    return (
        f"the last checkpoint is of step {max(steps)}"
        if steps
        else "no checkpoint is saved"
    )


def same_command(args: list[str]) -> str:
    """The command line as it was given: "python train.py --config=..."."""
    script = sys.argv[0] if sys.argv[0].endswith("train.py") else "-m medusa_jax train"
    return f"python {script} {shlex.join(args)}"


def pairs(args: list[str]) -> list[tuple[str, str]]:
    """["--a=1", "--b", "2", "--c"] -> [("a", "1"), ("b", "2"), ("c", "true")]."""
    given = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            raise UserError(f"unexpected argument {arg!r}; fields are --config.field=value")
        name, equals, value = arg[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        given.append((name, value))
    return given


def parse(args: list[str]) -> Config:
    """Command line -> configuration; raises as `read_config`."""
    return parse_all(args)[1]


def parse_all(args: list[str]) -> tuple[Flags, Config]:
    """Command line -> the flags and the configuration; raises as `read_config`."""
    found, fields = parser().parse_known_args(args)
    flags = typed(Flags, found)
    return flags, read_config(flags, fields)


def read_config(flags: Flags, fields: list[str]) -> Config:
    """The configuration that `flags` name, with `fields` ("--config.optim.lr=1e-3") set.

    Raises:
      UserError: an unknown flag or field (the nearest one is named), or a value of another type.
    """
    given = pairs(fields)
    for name, _ in given:
        if not name.startswith("config."):
            raise UserError(f"unknown flag --{name}{_nearest(name, Config())}")
    if flags.config is None:
        raise UserError(
            "--config=FILE.py is missing, e.g. --config=configs/demo_backbone.py"
        )
    cfg = load_config(flags.config)
    cfg.workdir = flags.workdir or cfg.workdir
    for name, value in given:
        override(cfg, name.removeprefix("config."), value)
    if not cfg.workdir and not cfg.dry_run and not cfg.data.preview:
        raise UserError("--workdir=DIR is missing: where checkpoints and results go")
    cfg.workdir = os.path.abspath(cfg.workdir)
    return cfg


def load_config(path: str) -> Config:
    """Run `get_config()` of a Python file."""
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        there = (
            [f for f in os.listdir(folder) if f.endswith(".py")]
            if os.path.isdir(folder)
            else []
        )
        near = did_you_mean(os.path.basename(path), there)
        hint = f"; {folder} has {', '.join(sorted(there))}{near}" if there else ""
        raise UserError(f"there is no configuration file {path}{hint}")
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


def override(cfg: Config, path: str, text: str) -> None:
    """Set the field at `path` ("optim.lr") to `text`, read as the field's type."""
    owner: Any = cfg
    *groups, last = path.split(".")
    for depth, name in enumerate([*groups, last]):
        if not dataclasses.is_dataclass(owner) or not hasattr(owner, name):
            near = _nearest(f"config.{path}", cfg)
            group = ".".join(["config", *groups[:depth]])
            fields = dataclasses.fields(owner) if dataclasses.is_dataclass(owner) else ()
            known = f" ({group} has {', '.join(f.name for f in fields)})" if fields else ""
            raise UserError(f"unknown field --config.{path}{near}{known}")
        if depth < len(groups):
            owner = getattr(owner, name)
    kind = typing.get_type_hints(type(owner))[last]
    if dataclasses.is_dataclass(kind):
        raise UserError(f"--config.{path} is a group of fields; set one of them")
    setattr(owner, last, convert(text, kind, path))


def convert(text: str, kind: Any, path: str) -> Any:
    """`text` as bool, int, float, str, a tuple of ints or one of a few values."""
    few = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    try:
        if kind is bool or few:
            values = {str(x).lower(): x for x in few or (True, False)}
            return (values | {"1": True, "0": False})[text.lower()]
        if typing.get_origin(kind) is tuple:
            parts = tuple(int(x) for x in text.strip("()[] ").split(","))
            if len(parts) != len(typing.get_args(kind)):
                raise ValueError
            return parts
        return kind(text)
    except (ValueError, KeyError):
        name = kind if typing.get_origin(kind) else getattr(kind, "__name__", str(kind))
        if few:
            name = ", ".join(str(x).lower() for x in few)
        raise UserError(f"--config.{path} takes {name}, not {text!r}") from None


def field_names(owner: Any, prefix: str = "") -> list[str]:
    """Dotted names of all fields: ["model.path", ...]."""
    names = []
    for field in dataclasses.fields(owner):
        value = getattr(owner, field.name)
        if dataclasses.is_dataclass(value):
            names += field_names(value, f"{prefix}{field.name}.")
        else:
            names.append(prefix + field.name)
    return names


def _nearest(flag: str, cfg: Config) -> str:
    """ "; did you mean --config.optim.lr?" for "config.optm.lr", "config.lr" or "learning_rate"."""
    asked = flag.removeprefix("config.").replace("-", "_")
    last = asked.split(".")[-1]
    fields = field_names(cfg)
    by_last = {field.split(".")[-1]: field for field in reversed(fields)}
    near = ALIASES.get(last) or by_last.get(last) or nearest(asked, [*OWN, *fields])
    near = near or by_last.get(nearest(last, by_last), "")
    if not near:
        return ""
    return f"; did you mean --{near if near in OWN else f'config.{near}'}?"


if __name__ == "__main__":
    sys.exit(main())
