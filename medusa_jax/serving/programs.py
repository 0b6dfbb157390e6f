"""Which programs are compiled, and the thread that compiles the others, for which no request waits."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from medusa_jax.console import inform
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import BASE, Group

# For this many seconds after a failed compilation, requests that need the program get its error; then it
# is tried again.
RETRY_SECONDS = 2.0


class Programs(NamedTuple):
    """What a group of requests needs at one size of the batch."""

    group: Group
    rows: int
    slots: int


class NotCompiled(Exception):
    """These programs cannot be compiled, for lack of memory perhaps."""


class Compiler:
    """Compiles on a separate batch: JAX keeps programs for the whole process.

    Args:
      make_batch: makes that batch, when there is something to compile.
      changed: called in the compiler's thread when programs are ready or failed to compile.

    Attributes:
      failures: how often nothing could be compiled, while nothing at all is.
    """

    def __init__(
        self, make_batch: Callable[[], Batch], changed: Callable[[], None]
    ) -> None:
        self._make_batch, self._changed = make_batch, changed
        self._ready: set[Programs] = set()
        self._failed: dict[Programs, tuple[float, str]] = {}
        self._wanted: list[Programs] = []  # requests wait for these
        self._plan: list[Programs] = []  # ahead of any request
        self._now: Programs | None = None
        self._closed = False
        self.failures = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    def ready(self, programs: Programs) -> bool:
        """Whether these are compiled; if not, they are next.

        Raises:
          NotCompiled: that was tried a moment ago.
        """
        if programs in self._ready:
            return True
        with self._wake:
            at, why = self._failed.get(programs, (0.0, ""))
            if why and time.monotonic() - at < RETRY_SECONDS:
                raise NotCompiled(why)
            if programs not in (*self._wanted, self._now):
                self._wanted.append(programs)
                self._wanted.sort(key=lambda wanted: wanted.group != BASE)
                self._wake.notify_all()
        return programs in self._ready

    def known(self, programs: Programs) -> bool:
        """Whether these are compiled; does not wait for them."""
        return programs in self._ready

    def plan(self, programs: Iterable[Programs]) -> None:
        """Compile these, in this order, while no others are awaited."""
        with self._wake:
            self._plan += programs
            self._wake.notify_all()

    @property
    def planned(self) -> bool:
        """Whether something is still to be compiled ahead."""
        return bool(self._plan)

    def wait(self) -> None:
        """Until nothing is to be compiled ahead."""
        with self._wake:
            self._wake.wait_for(lambda: not self._plan or self._closed)

    def close(self) -> None:
        """End, after the programs in hand."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        batch: Batch | None = None
        while True:
            with self._wake:
                if not (self._wanted or self._plan):
                    batch = None  # and its memory
                self._wake.wait_for(lambda: self._closed or self._wanted or self._plan)
                if self._closed:
                    return
                self._now = self._wanted.pop(0) if self._wanted else self._plan[0]
            why = ""
            if self._now not in self._ready:
                try:
                    batch = batch or self._make_batch()
                    batch.compile(*self._now)
                except Exception as error:
                    batch, why = None, f"{error}".strip().partition("\n")[0] or repr(error)
                return_memory()
            with self._wake:
                self._settle(self._now, why)
                self._now = None
                self._wake.notify_all()
            self._changed()

    def _settle(self, programs: Programs, why: str) -> None:
        ahead = programs in self._plan
        if why:
            self._failed[programs] = time.monotonic(), why
            self.failures += not self._ready
            if ahead:
                inform(f"warning: compiling ahead ends here: {why}")
                self._plan.clear()
            return
        self._ready.add(programs)
        self.failures = 0
        self._failed.pop(programs, None)
        if ahead:
            self._plan.remove(programs)


def return_memory() -> None:
    """Give back what compiling took: glibc keeps it, 150 MB for a program of 30 layers."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
