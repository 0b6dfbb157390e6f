"""What a run tells: one line while it trains, log.jsonl, TensorBoard events."""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from medusa_jax.console import say


def duration(seconds: float) -> str:
    """4000 -> "1h06m"."""
    s = int(max(seconds, 0))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s // 3600}h{s % 3600 // 60:02d}m"


class Progress:
    """Writes records of a run; lines of later steps than `start` are dropped from the log.

    With several processes only one of them (`write`) does so.
    """

    def __init__(
        self, workdir: str, start: int, total: int, tokens_per_step: int, write: bool = True
    ):
        self.total, self.tokens_per_step = total, tokens_per_step
        self.clock, self.step, self.rate = time.monotonic(), start, 0.0
        self.file: Any = None
        self.board: Any = None
        if not write:
            return
        path = os.path.join(workdir, "log.jsonl")
        kept = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                kept = [line for line in file if _step(line) <= start]
        self.file = open(path + ".new", "w", encoding="utf-8")  # noqa: SIM115
        self.file.writelines(kept)
        self.file.flush()
        os.replace(path + ".new", path)
        self.board = _tensorboard(workdir, start)

    def train(self, step: int, record: dict[str, Any]) -> None:
        """A training record after `step` updates; prints loss, speed and time left."""
        now = time.monotonic()
        if step > self.step:
            fresh = (step - self.step) / max(now - self.clock, 1e-9)
            self.rate = fresh if not self.rate else 0.7 * self.rate + 0.3 * fresh
            self.clock, self.step = now, step
        if self.file is None:
            return
        self._write(step, "train", record)
        left = duration((self.total - step) / self.rate) if self.rate else "?"
        speed = f"{self.rate * self.tokens_per_step:,.0f} tokens/s"
        say(f"step {step}/{self.total}  {_summary(record)}  {speed}  {left} left")

    def evaluation(self, step: int, record: dict[str, Any]) -> None:
        """An evaluation record."""
        if self.file is None:
            return
        self._write(step, "eval", record)
        say(f"step {step}/{self.total}  held-out {_summary(record)}")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What happens inside (evaluation, saving) does not count as training time."""
        begin = time.monotonic()
        yield
        self.clock += time.monotonic() - begin

    def _write(self, step: int, kind: str, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(finite({"step": step, "kind": kind, **record})) + "\n")
        self.file.flush()
        if self.board is None:
            return
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            for i, x in enumerate(values, start=1):
                tag = f"{kind}/{name}" + (f"/head_{i}" if isinstance(value, list) else "")
                self.board.add_scalar(tag, x, step)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def finite(value: Any) -> Any:
    """NaN and infinities, which JSON has no words for, become null: {"a": [nan]} -> {"a": [None]}."""
    if isinstance(value, dict):
        return {name: finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(record: dict[str, Any]) -> str:
    parts = []
    for name in ("lm_loss", "loss", "top1", "top5", "lr"):
        if name in record:
            value = record[name]
            text = (
                " ".join(f"{x:.3f}" for x in value)
                if isinstance(value, list)
                else f"{value:.4g}"
            )
            parts.append(f"{name} {text}")
    return "  ".join(parts)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut off by a kill


def _tensorboard(workdir: str, start: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(os.path.join(workdir, "tensorboard"), purge_step=start + 1)
