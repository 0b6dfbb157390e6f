"""Measuring in interleaved rounds; what is measured once on a machine, in a bounded time, and kept.

A first start measures which products are fastest, then which tree: together at most 5 s, with a line
each. What is known by then decides and is kept, however busy the machine was.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

from medusa_jax.console import cache_directory, inform, processor
from medusa_jax.errors import UserError
from medusa_jax.whole_files import write_json

# Most seconds for measuring products, and trees.
PRODUCTS, TREES = 1.5, 3.5
# Kinds of notes that are not read at present, see `anew`.
_unread: set[str] = set()
NEVER = threading.Event()

T = TypeVar("T")


def in_rounds(
    runs: Sequence[Callable[[], T]], rounds: int, over: threading.Event = NEVER
) -> Iterator[list[T]]:
    """Call every run once per round, in turn, so that what else the machine does favours none.

    Yields the results of a round; none of a round in which `over` is set.
    """
    for _ in range(rounds):
        found = []
        for run in runs:
            if over.is_set():
                return
            found.append(run())
        yield found


def within(seconds: float, what: str, measure: Callable[..., Any]) -> None:
    """Say what is measured, and wait for `measure` for at most this many seconds.

    It runs on a thread, since no compilation can be interrupted: when time is up, and on Ctrl-C, the
    caller goes on, and the thread ends with the program that it is compiling.

    Args:
      measure: takes `over`, an event that is set when time is up; it hands over results as it gets them.

    Raises: what `measure` raises in time.
    """
    inform(f"measuring {what}, once, at most {seconds:.1f} s ...")
    over, pool = threading.Event(), ThreadPoolExecutor(1)
    try:
        work, until = pool.submit(measure, over=over), time.monotonic() + seconds
        while not work.done() and (left := until - time.monotonic()) > 0:
            # Ctrl-C reaches a thread of the system's choice; this one sees it between two waits.
            wait([work], min(left, 0.1))
        if work.done():
            work.result()
    finally:
        over.set()
        pool.shutdown(wait=False)


@contextmanager
def anew(kind: str) -> Iterator[None]:
    """Within this block notes of a kind are not read: they are measured and written again."""
    _unread.add(kind)
    try:
        yield
    finally:
        _unread.remove(kind)


class DeviceCache:
    """A note about this machine, JAX and what else a measurement depends on.

    Args:
      kind: the folder of such notes.
      marks: what else it depends on; anything whose `repr` tells it apart.
    """

    def __init__(self, kind: str, *marks: Any) -> None:
        device = jax.devices()[0]
        machine = (jax.__version__, device.platform, device.device_kind, os.cpu_count())
        text = "\n".join(map(repr, (*machine, processor(), *marks)))
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.kind, self.file = kind, Path(cache_directory(kind)) / f"{name}.json"

    def read(self, name: str, kind: type[T]) -> T | None:
        """A value of the note; None where there is none of this type that can be read."""
        if self.kind in _unread:
            return None
        try:
            found = json.loads(self.file.read_text())[name]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if type(found) is kind else None

    def write(self, note: dict[str, Any]) -> None:
        """Keep a note; where that cannot be, it is measured again next time."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, note, indent=None)
        except (OSError, UserError):
            pass
