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


class Started:
    """Work that a thread does, and its two ends."""

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
        self._started: WeakKeyDictionary[Guide, Started] = WeakKeyDictionary()

    def replaced(self, works: Works) -> Works:
        for work in works.values():
            call = self._started.get(work.guide)
            if not call or not work.repeats(call.work):
                self._started[work.guide] = new_call = Started(work)
                self._pool.submit(new_call.run).add_done_callback(lambda _: self._wake())
        return self._in_time(works, "replaced")

    def filled(self, works: Works) -> Works:
        ready = self._in_time(works, "filled")
        for work in ready.values():
            del self._started[work.guide]
        return ready

    def _in_time(self, works: Works, event: str) -> Works:
        end = time.monotonic() + PATIENCE
        started = {row: self._started[work.guide] for row, work in works.items()}
        return {
            row: one.work
            for row, one in started.items()
            if getattr(one, event).wait(max(0.0, end - time.monotonic()))
        }

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        started = self._started.get(guide)
        return started is not None and not started.filled.is_set()

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
