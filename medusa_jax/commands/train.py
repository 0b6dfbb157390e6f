"""`medusa train`, train.py: `medusa train --config=FILE --workdir=DIR [--config.field=value ...]`."""

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medusa_jax.commands.flags import CommandLine, HostFlags, Parser, flag, on_hosts
from medusa_jax.commands.next_command import print_next
from medusa_jax.config import (
    Config,
    DataConfig,
    HeadsConfig,
    LlamaConfig,
    fields_of,
    override,
)
from medusa_jax.console import inform
from medusa_jax.devices.machine import keep_memory, warn_if_accelerator_unused
from medusa_jax.errors import (
    STOPS,
    Terminated,
    UserError,
    did_you_mean,
    nearest,
    stop_signal,
)
from medusa_jax.heads.names import drafter_at
from medusa_jax.notation import entries
from medusa_jax.training.data.sources import places

EXAMPLES = """\
examples:
  medusa train --config.model.path=path/to/model --config.data.source=talk.jsonl      as configs/own.py
  python train.py --config=configs/vicuna7b_m1.py --workdir=runs/vicuna7b_m1 --config.dry_run

any field of medusa_jax/config.py and of the drafter's file in medusa_jax/heads/:
  --config.optim.lr=1e-3 --config.mesh=1,4,2
  --config.dry_run           print a sample with its counted tokens marked, sizes and stored memory, then compile
                             the step from shapes alone and print memory, the chips it fits and traffic

Run again with the same --workdir, a training resumes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(HostFlags):
    """Train by a configuration."""

    config: str | None = flag(
        "a file with get_config() -> medusa_jax.config.Config (default: heads for a model of yours)",
        None,
    )
    workdir: str | None = flag(
        "checkpoints/, log.jsonl, tensorboard/, best/ and export/ go there", None
    )
    devices: int | None = flag("simulated devices of a dry run", None, metavar="N")
    # As they are typed: "--config.optim.lr=1e-3".
    fields: tuple[str, ...] = ()


class FieldsLine(CommandLine[Any]):
    """A command that takes the fields of a training, too, and leaves them as words in `fields` of its flags."""

    def parse(self, argv: Sequence[str] | None = None) -> Any:
        values, fields = self.parser().parse_known_args(argv)
        return self.kind(**vars(values) | {"fields": tuple(fields)})


def run(flags: Flags) -> int:
    """Train by a configuration's file; returns the exit status."""
    cfg, complete = configured(flags)
    if flags.devices is not None:
        from medusa_jax.devices.platforms import simulate_devices

        if not cfg.dry_run or flags.devices < 1:
            raise UserError("--devices simulates 1 or more devices for --config.dry_run")
        simulate_devices(flags.devices)
    try:
        return on_hosts(lambda _: train(complete(cfg)))(flags)
    except (KeyboardInterrupt, Terminated) as stop:
        number = stop_signal(stop)
        if cfg.dry_run:  # keeps nothing to go on with
            inform(f"stopped by {STOPS[number]}")
            return 128 + number
        if not hasattr(stop, "__notes__"):
            stop.add_note(f"stopped at once; {last_checkpoint(cfg.workdir)}")
        raise


def train(cfg: Config) -> int:
    """Train, or with `dry_run` only compile; returns the exit status. Raises as `train_plan`."""
    from medusa_jax.training.plan import RunPlan

    plan = RunPlan(cfg, dry=cfg.dry_run)
    warn_if_accelerator_unused()
    if plan.drafter:
        tell_engines(plan.heads, plan.model.path, plan.arch)
    if cfg.dry_run:
        from medusa_jax.training.dry import dry_run

        dry_run(plan)
        return 0
    from medusa_jax.kept_programs import use_compilation_cache
    from medusa_jax.training.run_log import outlook
    from medusa_jax.training.trainer import train_plan

    use_compilation_cache()  # a resumed run starts at once
    keep_memory()
    train_plan(plan)
    if line := outlook(plan.workdir):
        inform(line)
    tell_calibration(plan.workdir, plan.model.path, plan.data, plan.heads.drafter)
    return 0


def tell_engines(heads: HeadsConfig, model: str, arch: LlamaConfig) -> None:
    """Print the engines that run these heads, and why others of the family do not."""
    from medusa_jax import hosts
    from medusa_jax.files.hub import is_here
    from medusa_jax.files.layouts.engines import engines_for

    if not hosts.first():
        return
    able, unable = engines_for(heads, arch if is_here(model) else None)
    targets = [f"{engine} ({target})" for engine, target in able.items()]
    inform(f"engines for these heads (convert --to): {', '.join(targets) or 'none'}")
    for engine, why in unable.items():
        inform(f"not {engine}: {why}")


def tell_calibration(workdir: str, model: str, data: DataConfig, name: str) -> None:
    """Print the command that calibrates the exported heads, if there are any."""
    export = os.path.join(workdir, "export")
    heads = os.path.join(export, "heads")
    if os.path.isdir(heads):  # inside a trained backbone
        model = export
    else:
        heads = export
    if (prompts := prompts_in(data)) and os.path.isfile(os.path.join(heads, "heads.json")):
        print_next(
            "calibrate",
            model=model or None,
            drafter=drafter_at(name, heads),
            prompts=prompts,
            chat_template=data.chat_template or None,
            out=os.path.join(heads, "tree.json"),
        )


def prompts_in(data: DataConfig) -> str:
    """Prompts for `calibrate`: held-out text, else text that heads learned from; "" if all sources are tokens alone."""
    for source in places(data.eval_source) + places(data.source):
        # `distill` and the demo's corpus write prompts next to the tokens.
        names = ("samples.jsonl", "prompts.jsonl", "tokens.npy")
        found = [name for name in names if os.path.isfile(os.path.join(source, name))]
        if found != ["tokens.npy"]:
            return os.path.join(source, found[0]) if found else source
    return ""


def last_checkpoint(workdir: str) -> str:
    """The checkpoint that a resumed run starts from: "the last checkpoint is of step 40"."""
    directory = os.path.join(workdir, "checkpoints")
    names = os.listdir(directory) if os.path.isdir(directory) else []
    steps = [int(name) for name in names if name.isdigit()]
    return f"the last checkpoint is of step {max(steps)}" if steps else "no checkpoint yet"


def parse(args: list[str]) -> Config:
    """Command line -> complete configuration; raises as `configured`."""
    cfg, complete = configured(main.parse(args))
    return complete(cfg)


def configured(flags: Flags) -> tuple[Config, Callable[[Config], Config]]:
    """The configuration that the flags ask for, and what completes it on this device.

    Raises:
      UserError: an unknown flag or field (the nearest one is named), or a value of another type.
    """
    if flags.config is None:
        from medusa_jax.training import own_recipe as module  # imports JAX: not for --help
    else:
        module = load_recipe(flags.config)
    cfg = module.get_config()
    known_fields, _ = fields_parser(cfg).parse_known_args(flags.fields)
    drafter = vars(known_fields).get("heads.drafter")
    if drafter and type(cfg.heads) is HeadsConfig:
        from medusa_jax.heads.registry import whole_config  # imports JAX: not for --help

        # With the fields of this drafter, which the command line may set, too.
        cfg.heads = whole_config(dataclasses.replace(cfg.heads, drafter=drafter))
    values = vars(fields_parser(cfg).parse_args(flags.fields))
    for path, value in values.items():
        override(cfg, path, value)
    cfg.workdir = flags.workdir or cfg.workdir
    if not cfg.workdir and not cfg.dry_run:
        raise UserError("--workdir=DIR is missing: where checkpoints and results go")
    cfg.workdir = os.path.abspath(cfg.workdir)
    complete = getattr(module, "complete", lambda cfg, _: cfg)
    return cfg, lambda cfg: complete(cfg, frozenset(values))


def load_recipe(path: str) -> types.ModuleType:
    """Run a Python file with `get_config()` -> `Config`.

    Its optional `complete(cfg, names)` is called after several processes have met and the command line's
    fields, whose dotted names are `names`, were set.
    """
    folder, name = os.path.split(path)
    if not os.path.isfile(path):
        names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise UserError(f"there is no configuration file {path}{did_you_mean(name, names)}")
    module = types.ModuleType("medusa_jax_config")
    module.__file__ = path
    # A configuration may build on another one: `from configs.base import get_config`.
    root = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    try:
        sys.path.insert(0, root)
        try:
            exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
        finally:
            sys.path.remove(root)
        is_config = isinstance(module.get_config(), Config)
    except Exception as error:
        raise UserError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if not is_config:
        raise UserError(f"get_config() in {path} must return a medusa_jax.config.Config")
    return module


def fields_parser(cfg: Config) -> Parser:
    """A parser with a flag --config.FIELD for each field; a bool needs no value."""
    parser = Parser("train.py", allow_abbrev=False, argument_default=argparse.SUPPRESS)
    by_last = {}
    for path, owner, name in reversed([*fields_of(cfg)]):
        kind = typing.get_type_hints(type(owner))[name]
        by_last[name] = path
        switch = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(f"--config.{path}", dest=path, type=reader(kind), **switch)  # type: ignore[arg-type]

    def hint(flag: str) -> str:
        name = flag.removeprefix("--").removeprefix("config.").replace("-", "_")
        leaf = name.split(".")[-1]
        path = by_last.get(leaf) or nearest(name, by_last.values())
        path = path or by_last.get(nearest(leaf, by_last), "")
        return f"; did you mean --config.{path}?" if path else ""

    parser.hint = hint  # type: ignore[assignment, method-assign]
    return parser


def reader(kind: Any) -> Callable[[str], Any]:
    """Reads text as a bool, int, float, str or a tuple of them."""

    def read(text: str) -> Any:
        if kind is bool:
            if text.lower() not in ("false", "true", "0", "1"):
                raise ValueError
            return text.lower() in ("true", "1")
        if typing.get_origin(kind) is tuple:
            one = reader(typing.get_args(kind)[0])
            return tuple(one(x) for x in entries(text.strip("()[] ")))
        return kind(text)

    read.__name__ = getattr(kind, "__name__", str(kind))  # for messages
    return read


main = FieldsLine("medusa train", Flags, run, EXAMPLES, resumes=True)
