"""Threads that compute the tokens which constraints allow, so that one slow row holds up no other."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from weakref import WeakKeyDictionary

from medusa_jax.constraints.guide import Guide
from medusa_jax.constraints.host_work import RowWork, Works
from medusa_jax.errors import UserError, first_line

# Seconds that a step waits for threads; rows whose work is late skip the step.
WAIT_SECONDS = 0.02


class WorkCall:
    """A row's work in a thread, with an event for its end."""

    def __init__(self, work: RowWork) -> None:
        self.work, self.filled = work, Event()

    def run(self) -> None:
        """Do the work; an error is stored in the guide."""
        try:
            self.work.fill()
        # A panic of the grammar engine is not an `Exception`.
        except BaseException as error:
            prefix = "" if isinstance(error, UserError) else "the grammar engine failed: "
            self.work.stuck, self.work.guide.error = True, f"{prefix}{first_line(error)}"
        self.filled.set()


class GuideThreads:
    """Runs the work of rows in threads. The row's next step uses work that came late.

    Threads use half of the cores, so steps continue while one computes for seconds.

    Args:
      wake: called when a row's work is done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool, self._wake = ThreadPoolExecutor(threads, "guides"), wake
        self._calls: WeakKeyDictionary[Guide, WorkCall] = WeakKeyDictionary()

    def filled(self, works: Works) -> Works:
        """Start the work; return the rows whose work is ready in time."""
        for work in works.values():
            call = self._calls.get(work.guide)
            if not call or not work.repeats(call.work):
                self._calls[work.guide] = call = WorkCall(work)
                self._pool.submit(call.run).add_done_callback(lambda _: self._wake())
        end, ready = time.monotonic() + WAIT_SECONDS, {}
        for row, work in works.items():
            call = self._calls[work.guide]
            if call.filled.wait(max(0.0, end - time.monotonic())):
                ready[row] = call.work
                del self._calls[work.guide]
        return ready

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        call = self._calls.get(guide)
        return call is not None and not call.filled.is_set()

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
