"""Logs of a run: progress lines, log.jsonl, TensorBoard events, curves.png, W&B."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.training.log.curves import draw_run, read_log
from medusa_jax.training.log.tensorboard import Board
from medusa_jax.whole_files import Json, replacing, write_text


class RunLog:
    """Writes the records of a run; drops lines of steps after `start` from an existing log.

    With several processes only one of them (`write`) writes.
    """

    def __init__(
        self, workdir: str, start: int, total: int, tokens_per_step: int, write: bool = True,
        curves: bool = False, wandb: str = "", config: Json | None = None,
    ):  # fmt: skip
        """Open all logs.

        Args:
          start: steps before this start.
          curves: draw `<workdir>/curves.png` at every evaluation and at the end.
          wandb: name of a Weights & Biases project, "" for none; `config` goes there.
        """
        self.total, self.tokens_per_step = total, tokens_per_step
        self.workdir, self.curves = workdir, curves
        self.clock, self.step, self.rate = time.monotonic(), start, 0.0
        self.file: TextIO | None = None
        self.board: Board | None = None
        self.wandb: Any = None
        if not write:
            return
        path = Path(workdir, "log.jsonl")
        kept = [r for r in read_log(path) if r.get("step", math.inf) <= start]
        with replacing(path) as new:
            self.file = open(new, "w", encoding="utf-8")  # noqa: SIM115
            self.file.writelines(json.dumps(record) + "\n" for record in kept)
            self.file.flush()
        with contextlib.suppress(ImportError):  # tensorboardX is optional
            self.board = Board(workdir, start)
        if wandb:
            self.wandb = start_wandb(workdir, wandb, config or {})

    def train(self, step: int, record: Json) -> None:
        """Log a training record after `step` updates; print loss, speed and time left."""
        now = time.monotonic()
        if step > self.step:
            fresh = (step - self.step) / max(now - self.clock, 1e-9)
            self.rate = fresh if not self.rate else 0.7 * self.rate + 0.3 * fresh
            self.clock, self.step = now, step
        if self.file is None:
            return
        self._write(step, "train", record)
        left = tqdm.format_interval((self.total - step) / self.rate) if self.rate else "?"
        speed = f"{self.rate * self.tokens_per_step:,.0f} tokens/s"
        inform(f"step {step}/{self.total}  {_summary(record)}  {speed}  {left} left")

    def evaluation(self, step: int, record: Json) -> None:
        """Log an evaluation record."""
        if self.file is None:
            return
        self._write(step, "eval", record)
        if self.board is not None:
            with self._write_errors():
                self.board.flush()
        inform(f"step {step}/{self.total}  held-out {_summary(record)}")
        self.draw()

    def draw(self) -> None:
        """Redraw curves.png; a failure stops only the drawing, not the run."""
        if not self.curves or self.file is None:
            return
        log = Path(self.workdir) / "log.jsonl"
        try:
            draw_run(read_log(log), log.with_name("curves.png"))
        except (UserError, OSError) as error:
            inform(f"no curves.png: {error}")
            self.curves = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block (evaluation, saving) from training time."""
        begin = time.monotonic()
        yield
        self.clock += time.monotonic() - begin

    def _write(self, step: int, kind: str, record: Json) -> None:
        assert self.file is not None
        with self._write_errors():
            self.file.write(
                json.dumps(finite({"step": step, "kind": kind, **record})) + "\n"
            )
            self.file.flush()
        if self.board is None and self.wandb is None:
            return
        scalars = {}
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            for i, x in enumerate(values, start=1):
                tag = f"{kind}/{name}" + (f"/head_{i}" if isinstance(value, list) else "")
                scalars[tag] = x
        if self.board is not None:
            with self._write_errors():
                self.board.add(step, scalars)
        if self.wandb is not None:
            self.wandb.log(scalars, step=step)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the log in {self.workdir} could not be written: {error.strerror}; the same "
                "command resumes from the last checkpoint"
            ) from error

    def close(self) -> None:
        """Draw the last curves and close all logs.

        Ignores errors: every record was flushed when written, and a failure was raised then.
        """
        self.draw()
        for sink in (self.file, self.board):
            if sink is not None:
                with contextlib.suppress(OSError):
                    sink.close()
        if self.wandb is not None:
            self.wandb.finish()


def start_wandb(workdir: str, project: str, config: Json) -> Any:
    """Start or, in a resumed training, continue a Weights & Biases run.

    Raises:
      UserError: wandb is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise UserError(
            f"train.wandb is {project!r}, but wandb is not installed: pip install wandb"
        ) from None
    file = Path(workdir) / "wandb_id"
    known = file.read_text().strip() if file.exists() else None
    run = wandb.init(project=project, dir=workdir, config=config, id=known, resume="allow")
    write_text(file, run.id)
    return run


def finite(value: object) -> object:
    """Replace NaN and infinities, which JSON lacks, by null: {"a": [nan]} -> {"a": [None]}."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(record: Json) -> str:
    parts = []
    for name in ("lm_loss", "loss", "inside", "top1", "top5", "accepted_length_tree", "lr"):
        if name in record:
            value = record[name]
            text = (
                " ".join(f"{x:.3f}" for x in value)
                if isinstance(value, list)
                else f"{value:.4g}"
            )
            parts.append(f"{name} {text}")
    return "  ".join(parts)
