"""Stop a run after its current step, and resume it with the configuration, text and frozen weights that it began with.

`config.json` in the workdir is the configuration of the last start; a checkpoint's `data` describes its rows
and frozen weights.
"""

import json
import os
import signal
import threading
import zlib
from contextlib import suppress
from types import FrameType
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from medusa_jax import hosts
from medusa_jax.console import inform
from medusa_jax.errors import STOPS, Terminated, UserError
from medusa_jax.training.data.rows import Rows
from medusa_jax.whole_files import Json, write_json

FILE = "config.json"
# Groups and fields that a resumed run must not change: the trained variables, the optimizer, the rows and their
# order. Text and frozen weights are compared by content, so that files may move.
FIXED = (
    "model.arch", "model.param_dtype", "model.quantise", "model.add_layers", "heads",
    "lora.rank", "lora.alpha", "data.seq_len", "data.packing", "data.seed", "data.held_out",
    "optim.name", "optim.heads_name", "optim.moment_dtype",
    "train.stage", "train.batch_size", "train.seed",
)  # fmt: skip
# Fields without influence on training.
FREE = ("workdir", "dry_run")
# Fields that only the first start reads.
INITIAL = ("data.draft_vocab_from", "train.heads_path")
# After a change of these, held-out scores are not comparable: the best score is reset.
SCORED = (
    "data.eval_source", "data.eval_samples", "train.lambda_decay", "train.lambda_0",
    "train.backbone_loss", "train.levels",
)  # fmt: skip
# Entries of a checkpoint's `data` and their names for messages.
CONTENT = {
    "kept_share": "share of samples held out in place of data.eval_source",
    "rows": "number of rows", "batch_size": "batch size", "text": "text",
    "backbone": "backbone", "draft_vocab": "draft vocabulary",
}  # fmt: skip


def record(workdir: str, config: Json) -> None:
    """Write the configuration for the next start."""
    if hosts.first():
        write_json(os.path.join(workdir, FILE), config)


def scored(config: Json) -> Json:
    """The fields that held-out scores depend on, stored in checkpoints."""
    fields = flatten_dict(config, sep=".")
    return {name: fields[name] for name in SCORED}


def changes(workdir: str, config: Json) -> dict[str, str]:
    """Fields that differ from the last start: {"optim.lr": "0.001 -> 0.0005"}.

    Args:
      config: all fields, as `dataclasses.asdict` returns them.

    Raises:
      UserError: fields of `FIXED` differ; names all of them.
    """
    try:
        with open(os.path.join(workdir, FILE), encoding="utf-8") as file:
            saved = flatten_dict(json.load(file), sep=".")
    except (OSError, ValueError) as error:
        if hosts.first():
            inform(f"changes of the configuration are not checked: {FILE}: {error}")
        return {}
    current = flatten_dict(json.loads(json.dumps(config)), sep=".")
    changed = {
        name: f"{saved.get(name)!r} -> {value!r}"
        for name, value in current.items()
        if saved.get(name) != value and name not in FREE
    }
    names = [
        f"{name}: {change}"
        for name, change in changed.items()
        if any(f"{name}.".startswith(f"{field}.") for field in FIXED)
    ]
    if names:
        raise UserError(
            f"the run in {workdir} was started with another configuration "
            f"({', '.join(names)}): set it back, or use another --workdir"
        )
    return changed


def contents(
    batch_size: int, rows: Rows, fingerprint: str | None, ids: jax.Array | None
) -> Json:
    """Description of the text and frozen weights, stored in checkpoints.

    Args:
      fingerprint: of the loaded backbone.
      ids: the draft vocabulary.
    """
    return {
        "rows": rows.rows,
        "batch_size": batch_size,
        "text": rows.crc,
        "kept_share": rows.cfg.kept_share,
        "backbone": fingerprint,
        "draft_vocab": None if ids is None else zlib.crc32(np.asarray(ids).data),
    }


def check(old: Json, new: Json, steps: int, workdir: str) -> None:
    """Refuse to resume with a different text, backbone or draft vocabulary, or beyond `steps`.

    Raises:
      UserError: names the difference.
    """
    if (step := old["step"]) > steps:
        raise UserError(
            f"the checkpoint in {workdir} is at step {step}, beyond the {steps} of this run: set "
            f"train.steps to {step} to export it unchanged, or higher to continue"
        )
    for name, word in CONTENT.items():
        if old[name] != new[name]:
            raise UserError(
                f"the checkpoint in {workdir} was made with another {word} ({old[name]}, now "
                f"{new[name]}): restore that, or use another --workdir"
            )


class StopRequest:
    """Handles SIGTERM and Ctrl-C while it is entered; a second Ctrl-C stops at once.

    Attributes:
      number: the signal that this process received, 0: none.
    """

    number = 0

    def __enter__(self) -> "StopRequest":
        self._before: dict[int, Any] = {}
        # Python allows handlers in the main thread only; with several processes JAX has its own.
        main = threading.current_thread() is threading.main_thread()
        if main and jax.process_count() == 1:
            self._before = {n: signal.signal(n, self._receive) for n in STOPS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with suppress(RuntimeError):  # interrupted another print
                inform("finishing this step, then saving; Ctrl-C again stops at once")

    def after(self, step: int) -> bool:
        """Whether to stop after `step`; with several processes all of them must ask after each step."""
        return bool(self.number) or hosts.asked_to_stop(step)

    def error(self, step: int) -> BaseException:
        """What the signal raises after `step`, where it was not caught."""
        number = self.number or signal.SIGTERM  # JAX does not say which
        stop = KeyboardInterrupt() if number == signal.SIGINT else Terminated()
        stop.add_note(
            f"stopped by {STOPS[number]} after step {step}; a checkpoint is saved"
        )
        return stop
