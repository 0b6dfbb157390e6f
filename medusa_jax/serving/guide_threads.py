"""Threads that compute the tokens which constraints allow, so that one slow row holds up no other."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from weakref import WeakKeyDictionary

from medusa_jax.constraints.host_work import Guide, RowWork, Workers, Works
from medusa_jax.errors import UserError, first_line

# Seconds that a step waits for threads; rows whose work is late skip the step.
PATIENCE = 0.02


class WorkCall:
    """A row's work in a thread, with events for its two results."""

    def __init__(self, work: RowWork) -> None:
        self.work, self.replaced, self.filled = work, Event(), Event()

    def run(self) -> None:
        """Do the work; an error is stored in the guide."""
        try:
            self.work.replace()
            self.replaced.set()
            self.work.fill()
        # A panic of the grammar engine is not an `Exception`.
        except BaseException as error:
            prefix = "" if isinstance(error, UserError) else "the grammar engine failed: "
            self.work.stuck, self.work.guide.error = True, f"{prefix}{first_line(error)}"
        self.replaced.set()
        self.filled.set()


class GuideThreads(Workers):
    """Runs the work of rows in threads. The row's next step uses work that came late.

    Threads use half of the cores, so steps continue while one computes for seconds.

    Args:
      wake: called when a row's work is done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool, self._wake = ThreadPoolExecutor(threads, "guides"), wake
        self._calls: WeakKeyDictionary[Guide, WorkCall] = WeakKeyDictionary()

    def replaced(self, works: Works) -> Works:
        for work in works.values():
            call = self._calls.get(work.guide)
            if not call or not work.repeats(call.work):
                self._calls[work.guide] = call = WorkCall(work)
                self._pool.submit(call.run).add_done_callback(lambda _: self._wake())
        return self._in_time(works, "replaced")

    def filled(self, works: Works) -> Works:
        finished = self._in_time(works, "filled")
        for work in finished.values():
            del self._calls[work.guide]
        return finished

    def _in_time(self, works: Works, event: str) -> Works:
        end = time.monotonic() + PATIENCE
        calls = {row: self._calls[work.guide] for row, work in works.items()}
        return {
            row: call.work
            for row, call in calls.items()
            if getattr(call, event).wait(max(0.0, end - time.monotonic()))
        }

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        call = self._calls.get(guide)
        return call is not None and not call.filled.is_set()

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
