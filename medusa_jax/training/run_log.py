"""Logs of a run: progress lines, log.jsonl, and TensorBoard's events."""

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from medusa_jax.console import inform
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, read_text, replacing

LOG = "log.jsonl"
# Metrics of a progress line, in this order; "objective" is the minimised sum of all terms.
SHOWN = ("objective", "lm_loss", "loss", "inside", "top1", "top5", "accepted_length_tree", "lr")  # fmt: skip
# For people, printed once.
LEGEND = (
    "each line: objective, which training lowers; for every head loss, the share of tokens inside its vocabulary, "
    "and how often its first guess (top1) or one of its first five (top5) is right; accepted_length_tree, tokens "
    "per step with the best tree of 64 nodes"
)
# Held-out tokens per step that still rise by more than this share between two evaluations: train longer.
RISING = 0.02


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
        self.board: Any = None

    def open(self) -> None:
        """Open all logs; drops lines of steps after the start from an existing log."""
        path = self.workdir / LOG
        records = [r for r in read_log(path) if r.get("step", math.inf) <= self.start]
        with replacing(path) as new:
            self.file = open(new, "w", encoding="utf-8")  # noqa: SIM115
            self.file.writelines(json.dumps(record) + "\n" for record in records)
            self.file.flush()
        with contextlib.suppress(ImportError):  # of tensorboardX, which is optional
            self.board = Board(self.workdir, self.start)
        inform(LEGEND)

    def train(self, step: int, record: Json) -> None:
        """Log a training record after `step` updates; print losses, speed and time left."""
        clock = time.monotonic()
        if step > self.step:
            rate = (step - self.step) / max(clock - self.clock, 1e-9)
            self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
            self.clock, self.step = clock, step
        eta = tqdm.format_interval((self.total - step) / self.rate) if self.rate else "?"
        speed = f"{self.rate * self.tokens_per_step:,.0f} tokens/s"
        self._write(step, "train", record)
        self._print(step, record, f"  {speed}  {eta} left")

    def evaluation(self, step: int, record: Json) -> None:
        self._write(step, "eval", record)
        self._print(step, record, "", "held-out ")

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
            is_list = isinstance(value, list)
            for i, x in enumerate(value if is_list else [value], start=1):
                scalars[f"{kind}/{name}" + (f"/head_{i}" if is_list else "")] = x
        try:
            self.file.write(line + "\n")
            self.file.flush()
            if self.board:
                self.board.add(step, scalars)
                if kind == "eval":
                    self.board.flush()
        except OSError as error:
            raise UserError(
                f"the log in {self.workdir} could not be written: {error.strerror}; the same "
                "command resumes from the last checkpoint"
            ) from error

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

    def close(self) -> None:
        """Close all logs.

        Ignores errors: every record was flushed when written, and a failure was raised then.
        """
        for log in filter(None, (self.file, self.board)):
            with contextlib.suppress(OSError):
                log.close()


class Board:
    """TensorBoard's events of a run in one file; viewers drop events of later steps than `start` from earlier files.

    Written by the caller's thread: the thread of tensorboardX's `SummaryWriter` ends when the disk is full, and
    then the eleventh event blocks its caller for ever.
    """

    def __init__(self, workdir: Path, start: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory = workdir / "tensorboard"
        directory.mkdir(parents=True, exist_ok=True)
        self.writer, self.event = EventsWriter(str(directory / "events")), Event
        restart = SessionLog(status=SessionLog.START)
        self.writer.write_event(Event(step=start + 1, session_log=restart))
        self.flush, self.close = self.writer.flush, self.writer.close

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write one event with all scalars; buffered until `flush`."""
        from tensorboardX import summary

        values = self.event().summary
        for tag, x in scalars.items():
            values.MergeFrom(summary.scalar(tag, x))
        event = self.event(step=step, wall_time=time.time(), summary=values)
        self.writer.write_event(event)


def read_log(path: Path) -> list[Json]:
    """Records of log.jsonl, without a last line cut off by a kill; none if there is no file.

    Raises:
      UserError: not UTF-8, or a line that no run has written.
    """
    records, lines = [], read_text(path).split("\n") if path.exists() else [""]
    for number, line in enumerate(lines, 1):
        record = None
        with contextlib.suppress(ValueError):
            record = json.loads(line)
        if isinstance(record, dict) and record.keys() >= {"step", "kind"}:
            records.append(record)
        elif record is not None or number < len(lines):
            raise UserError(
                f"{path} is not the log of a run (line {number}): move it, or use another --workdir"
            )
    return records


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by null: {"a": [nan]} -> {"a": [None]}."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def outlook(workdir: str | Path) -> str:
    """Whether longer training would help, by the last two held-out evaluations; "" if they are missing."""
    name, records = "accepted_length_tree", read_log(Path(workdir) / LOG)
    found = [r for r in records if r.get("kind") == "eval" and name in r]
    if len(found) < 2:
        return ""
    before, after, step = found[-2][name], found[-1][name], found[-1]["step"]
    line = f"held-out tokens per step: {before:.2f}, then {after:.2f} at step {step}: "
    if after > before * (1 + RISING):
        return f"{line}longer training helps, e.g. --config.train.steps={2 * step}"
    return f"{line}more text or another family of heads helps more than further steps"
