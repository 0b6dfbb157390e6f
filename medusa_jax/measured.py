"""Interleaved rounds; measurements made once per machine, in a bounded time, and kept.

A first start measures which tree is fastest. The results in time decide and are kept, however noisy they are.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import jax

from medusa_jax.console import cache_directory, inform, processor
from medusa_jax.errors import UserError
from medusa_jax.whole_files import Json, write_json

# Most seconds for measuring trees.
TREES = 3.5

T = TypeVar("T")


def in_rounds(runs: Sequence[Callable[[], T]], rounds: int) -> Iterator[list[T]]:
    """Call every run once per round: other work on the machine then favours none of them.

    Yields the results of each round.
    """
    for _ in range(rounds):
        yield [run() for run in runs]


def within(seconds: float, what: str, results: Iterator[T]) -> list[T]:
    """Print a line about the measurement, if there is time, and return the results of at most this many seconds.

    They are computed on a thread, since a compilation cannot be interrupted. When time is up, and on
    Ctrl-C, the caller continues, and the thread ends after its result.
    """
    if seconds > 0:
        inform(f"measuring {what}, once, at most {seconds:.1f} s ...")
    found: list[T] = []
    pool, until = ThreadPoolExecutor(1), time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            work = pool.submit(lambda: next(results, None))
            while left > 0 and not work.done():
                # The system chooses the thread that Ctrl-C reaches; this one sees it between two waits.
                wait([work], min(left, 0.1))
                left = until - time.monotonic()
            if not work.done() or (result := work.result()) is None:
                break
            found.append(result)
    finally:
        pool.shutdown(wait=False)
    return found


class DeviceCache:
    """A note about this machine, JAX and the other things that a measurement depends on.

    Args:
      kind: the folder of such notes.
      marks: further dependencies, distinguished by their `repr`.
    """

    # Whether notes are not read at present.
    ignored = False

    def __init__(self, kind: str, *marks: object) -> None:
        device = jax.devices()[0]
        machine = (jax.__version__, device.platform, device.device_kind, os.cpu_count())
        text = "\n".join(map(repr, (*machine, processor(), *marks)))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = Path(cache_directory(kind)) / f"{name}.json"

    @classmethod
    @contextmanager
    def anew(cls) -> Iterator[None]:
        """Within this block notes are not read, so measurements are made and kept again."""
        cls.ignored = True
        try:
            yield
        finally:
            cls.ignored = False

    def read(self) -> Json:
        """The note; {} if there is none or it is damaged."""
        found = None
        with suppress(OSError, ValueError):
            found = None if self.ignored else json.loads(self.file.read_text())
        return found if isinstance(found, dict) else {}

    def write(self, note: Json) -> None:
        """Keep a note; if that fails, the measurement is made again next time."""
        with suppress(OSError, UserError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, note, indent=None)
