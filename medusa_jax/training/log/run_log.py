"""Logs of a run: progress lines, log.jsonl, and the optional sinks."""

import contextlib
import importlib
import importlib.util
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, replacing

# Metrics of a progress line, in this order.
SHOWN = ("lm_loss", "loss", "inside", "top1", "top5", "accepted_length_tree", "lr")


class Sink(Protocol):
    """Another log of the scalars."""

    def add(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Writes the records of a run, once it is open; with several processes only one opens it."""

    def __init__(self, workdir: str, start: int, total: int, tokens_per_step: int):
        """Args:
        start: steps before this start.
        total: last step of the run.
        """
        self.workdir, self.start, self.total = Path(workdir), start, total
        self.tokens_per_step = tokens_per_step
        self.clock, self.step, self.rate = time.monotonic(), start, 0.0
        self.file: TextIO | None = None
        self.curves = False
        self.sinks: list[Sink] = []

    def open(
        self, curves: bool = False, wandb: str = "", config: Json | None = None
    ) -> None:
        """Open all logs; drops lines of steps after the start from an existing log.

        Args:
          curves: draw `<workdir>/curves.png` at every evaluation and at the end.
          wandb: name of a Weights & Biases project, "" for none; `config` goes there.
        """
        path, self.curves = self.workdir / "log.jsonl", curves
        kept = [r for r in read_log(path) if r.get("step", math.inf) <= self.start]
        with replacing(path) as new:
            self.file = open(new, "w", encoding="utf-8")  # noqa: SIM115
            self.file.writelines(json.dumps(record) + "\n" for record in kept)
            self.file.flush()
        # Seams: an installed tensorboardX, the project of `train.wandb`.
        if importlib.util.find_spec("tensorboardX"):
            board = importlib.import_module("medusa_jax.training.log.tensorboard")
            self.sinks.append(board.Board(self.workdir, self.start))
        if wandb:
            project = importlib.import_module("medusa_jax.training.log.wandb_run")
            self.sinks.append(project.Project(self.workdir, wandb, config or {}))

    def train(self, step: int, record: Json) -> None:
        """Log a training record after `step` updates; print loss, speed and time left."""
        now = time.monotonic()
        if step > self.step:
            fresh = (step - self.step) / max(now - self.clock, 1e-9)
            self.rate = fresh if not self.rate else 0.7 * self.rate + 0.3 * fresh
            self.clock, self.step = now, step
        left = tqdm.format_interval((self.total - step) / self.rate) if self.rate else "?"
        speed = f"{self.rate * self.tokens_per_step:,.0f} tokens/s"
        self._write(step, "train", record)
        self._print(step, record, f"  {speed}  {left} left")

    def evaluation(self, step: int, record: Json) -> None:
        """Log an evaluation record."""
        self._write(step, "eval", record)
        with self._write_errors():
            for sink in self.sinks:
                sink.flush()
        self._print(step, record, "", "held-out ")
        self.draw()

    def draw(self) -> None:
        """Redraw curves.png; a failure stops only the drawing, not the run."""
        if not self.curves:
            return
        # Seam: `train.curves`, by matplotlib.
        curves = importlib.import_module("medusa_jax.training.log.curves")
        try:
            curves.draw_run(
                read_log(self.workdir / "log.jsonl"), self.workdir / "curves.png"
            )
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
        if self.file is None:
            return
        line = json.dumps(finite({"step": step, "kind": kind, **record}))
        scalars = {}
        for name, value in record.items():
            several = isinstance(value, list)
            for i, x in enumerate(value if several else [value], start=1):
                scalars[f"{kind}/{name}" + (f"/head_{i}" if several else "")] = x
        with self._write_errors():
            self.file.write(line + "\n")
            self.file.flush()
            for sink in self.sinks:
                sink.add(step, scalars)

    def _print(self, step: int, record: Json, end: str, kind: str = "") -> None:
        if self.file is None:
            return
        parts = []
        for name in SHOWN:
            value = record.get(name)
            if isinstance(value, list):
                parts.append(f"{name} {' '.join(f'{x:.3f}' for x in value)}")
            elif value is not None:
                parts.append(f"{name} {value:.4g}")
        inform(f"step {step}/{self.total}  {kind}{'  '.join(parts)}{end}")

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
        closing = [sink.close for sink in self.sinks]
        for close in closing if self.file is None else [self.file.close, *closing]:
            with contextlib.suppress(OSError):
                close()


def read_log(path: Path) -> list[Json]:
    """Records of log.jsonl, without lines cut off by a kill; none if there is no file."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null: {"a": [nan]} -> {"a": [None]}."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
