"""The thread that compiles programs, so that no other request waits for a compilation."""

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from medusa_jax.console import log
from medusa_jax.errors import first_line
from medusa_jax.serving.batch import Batch
from medusa_jax.serving.job import BASE, Group
from medusa_jax.serving.prompt_scores import score_prompt

# For this many seconds after a failed compilation, requests that need the program get its error; after that,
# compile again.
RETRY_SECONDS = 2.0
# Planned programs that took this many seconds are logged; faster ones came from the disk cache.
WORTH_A_LINE = 1.0
# Planned programs are compiled once no request has come for this many seconds: requests often come close together.
SETTLE_SECONDS = 2.0
# Priority of a thread that compiles ahead (Linux). XLA's own threads, more than half of the work, keep theirs.
NICE = 10


class Programs(NamedTuple):
    """The programs of a group of requests at one size of the batch.

    Attributes:
      nodes: of the tree that the ladder chose; None: the server's tree for this number of rows.
    """

    group: Group
    rows: int
    slots: int
    nodes: int | None = None

    def __str__(self) -> str:
        nodes = f", {self.nodes} nodes" if self.nodes else ""
        return f"{self.group}{nodes}; {self.rows} x {self.slots} tokens"

    def compile(self, batch: Batch) -> None:
        """Run them once on a batch."""
        batch.compile(*self)


class ScoringPrograms(NamedTuple):
    """The program that scores prompts (`prompt_scores.py`) with this many slots."""

    slots: int

    def __str__(self) -> str:
        return f"scoring of prompts; {self.slots} tokens"

    def compile(self, batch: Batch) -> None:
        """Run it for two pieces: the second may find the cache placed differently."""
        piece = batch.pieces[-1]
        prompt = [0] * min(piece + 2, self.slots)
        score_prompt(batch.engines.model, "", prompt, 0, piece, self.slots)


Planned = Programs | ScoringPrograms


class NotCompiled(Exception):
    """These programs cannot be compiled, for example for lack of memory."""


class Compiler:
    """Compiles on a separate batch: JAX caches programs for the whole process.

    Args:
      make_batch: creates that batch when the first program has to be compiled.
      changed: called in the compiler's thread when programs are ready or failed to compile.
      idle: whether no request is being answered. Planned programs wait for it.

    Attributes:
      failures: failed compilations before the first success.
    """

    def __init__(
        self,
        make_batch: Callable[[], Batch],
        changed: Callable[[], None],
        idle: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make_batch, self._changed, self._idle = make_batch, changed, idle
        self._ready: set[Planned] = set()
        self._failed: dict[Planned, tuple[float, str]] = {}
        self._queued: list[Programs] = []  # requests wait for these
        self._plan: list[Planned] = []  # ahead of any request
        self._batch: Batch | None = None
        self._closed = False
        self.failures = 0
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="compiling", daemon=True)
        self._thread.start()

    def ready_or_queue(self, programs: Programs) -> bool:
        """Return whether these are compiled; if not, queue them ahead of planned ones.

        Raises:
          NotCompiled: their compilation failed recently.
        """
        if programs in self._ready:
            return True
        with self._wake:
            at, reason = self._failed.get(programs, (0.0, ""))
            if reason and time.monotonic() - at < RETRY_SECONDS:
                raise NotCompiled(reason)
            if programs not in self._queued:
                log(f"compiling, a call waits: {programs}")
                self.queue(programs)
        return programs in self._ready

    def queue(self, programs: Programs) -> None:
        """Compile these before planned ones, for `BASE` requests first."""
        with self._wake:
            self._queued.append(programs)
            self._queued.sort(key=lambda key: key.group != BASE or key.nodes is not None)
            self._wake.notify_all()

    def is_queued(self, programs: Programs) -> bool:
        """Return whether these have yet to be compiled, and are queued."""
        return programs in self._queued

    def is_ready(self, programs: Programs) -> bool:
        """Return whether these are compiled."""
        return programs in self._ready

    def plan(self, programs: Iterable[Planned]) -> None:
        """Compile these in this order while the server is idle."""
        with self._wake:
            self._plan += programs
            self._wake.notify_all()

    def look_again(self) -> None:
        """Wake the compiling thread: the server may be idle now."""
        with self._wake:
            self._wake.notify_all()

    def wait(self, programs: Programs | None = None) -> None:
        """Wait until these are not queued any more, by default until no planned programs are left."""

        def left() -> bool:
            return self.is_queued(programs) if programs else bool(self._plan)

        with self._wake:
            self._wake.wait_for(lambda: not left() or self._closed)

    def close(self) -> None:
        """Compile nothing more. A compilation cannot be interrupted; only the interpreter's exit waits for it."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        atexit.register(self._thread.join)

    def _next(self) -> Planned | None:
        """Return the programs to compile now, if any."""
        if self._queued:
            return self._queued[0]
        return self._plan[0] if self._plan and self._idle() else None

    def _run(self) -> None:
        is_planned = False
        while True:
            with self._wake:
                if not self._next():
                    self._batch, is_planned = None, False  # frees its memory
                self._wake.wait_for(lambda: self._closed or self._next())
                if not (self._queued or is_planned):
                    self._wake.wait_for(
                        lambda: self._closed or self._queued, SETTLE_SECONDS
                    )
                if self._closed:
                    return
                programs = self._next()
                is_planned = not self._queued
            if not programs:
                continue  # a request has come
            start = time.monotonic()
            if is_planned:
                with ThreadPoolExecutor(1, "compiling", lower_priority) as pool:
                    reason = pool.submit(self._compile, programs).result()
            else:
                reason = self._compile(programs)
            with self._wake:
                self._settle(programs, reason, time.monotonic() - start)
                self._wake.notify_all()
            self._changed()

    def _compile(self, programs: Planned) -> str:
        """Compile; return why that failed, or ""."""
        if programs in self._ready:
            return ""
        try:
            self._batch = self._batch or self._make_batch()
            programs.compile(self._batch)
            return ""
        except Exception as error:
            self._batch = None
            return first_line(error)
        finally:
            return_memory()

    def _settle(self, programs: Planned, reason: str, seconds: float) -> None:
        is_queued, is_planned = programs in self._queued, programs in self._plan
        if reason:
            log(f"warning: not compiled: {programs}: {reason}")
            self._failed[programs] = time.monotonic(), reason
            self.failures += not self._ready
        else:
            self._ready.add(programs)
            self.failures = 0
            if is_queued or seconds > WORTH_A_LINE:
                log(f"compiled in {seconds:.1f} s: {programs}")
        if is_queued:
            self._queued = [other for other in self._queued if other != programs]
        if is_planned:
            self._plan.remove(programs)
            if reason:
                self._plan.clear()
                log("compiling ahead ends here")
            elif not self._plan:
                log("all planned programs are ready")


def lower_priority() -> None:
    """Lower this thread's priority, which cannot be raised again."""
    with contextlib.suppress(AttributeError, OSError):  # not on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def return_memory() -> None:
    """Return freed memory to the system: glibc keeps 100 MB after compiling for the demo model."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
