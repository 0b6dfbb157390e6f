"""Threads that compute the tokens which constraints allow, so that one slow row holds up no other."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from weakref import WeakKeyDictionary

from medusa_jax.decoding.guides import Guide, RowWork, Workers, Works
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
        except BaseException as error:  # a panic of the grammar engine is no `Exception`
            what = "" if isinstance(error, UserError) else "the grammar engine failed: "
            self.work.stuck, self.work.guide.error = True, f"{what}{first_line(error)}"
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
            earlier = self._started.get(work.guide)
            if not earlier or not work.repeats(earlier.work):
                self._started[work.guide] = started = Started(work)
                self._pool.submit(started.run).add_done_callback(lambda _: self._wake())
        mine = {row: self._started[work.guide] for row, work in works.items()}
        return self._in_time({row: (one.work, one.replaced) for row, one in mine.items()})

    def filled(self, works: Works) -> Works:
        mine = {row: self._started[work.guide] for row, work in works.items()}
        ready = self._in_time({row: (one.work, one.filled) for row, one in mine.items()})
        for work in ready.values():
            del self._started[work.guide]
        return ready

    @staticmethod
    def _in_time(works: Mapping[int, tuple[RowWork, Event]]) -> Works:
        end = time.monotonic() + PATIENCE
        ready = {
            row: done.wait(max(0.0, end - time.monotonic()))
            for row, (_, done) in works.items()
        }
        return {row: work for row, (work, _) in works.items() if ready[row]}

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        started = self._started.get(guide)
        return started is not None and not started.filled.is_set()

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
