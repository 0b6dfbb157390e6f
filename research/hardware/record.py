"""Figures of a part, on disk as soon as they are known."""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_jax.whole_files import Json

RESULTS = "results.jsonl"


class Record:
    """Appends a line for each figure; several processes may append to one file.

    Attributes:
      small: tiny sizes, to try the parts on a CPU.
    """

    def __init__(self, out: Path, part: str, seconds: float, small: bool) -> None:
        self.path, self.part, self.small = out / RESULTS, part, small
        self.began = time.monotonic()
        self._end = self.began + seconds

    def left(self) -> float:
        """Seconds until the part should end."""
        return self._end - time.monotonic()

    def row(self, title: str, **figures: Any) -> None:
        """Write a figure, and wait until it is on disk."""
        at = round(time.monotonic() - self.began, 1)
        line = json.dumps(
            {"part": self.part, "at": at, "what": title} | figures, default=str
        )
        with open(self.path, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line[:400], flush=True)

    @contextlib.contextmanager
    def trying(self, title: str, **facts: Any) -> Iterator[None]:
        """An error in the block is a figure, too; what comes after it runs."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {str(error)[:600]}"
            trace = traceback.format_exc()[-700:]
            self.row(title, **facts, error=message, where=trace)


def read_rows(out: Path) -> list[Json]:
    """All figures; a line that a kill cut off is left out."""
    rows = []
    path = out / RESULTS
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
