"""Threads that compute the tokens which constraints allow, so that one slow row holds up no other."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from medusa_jax.constraints.guide import Guide
from medusa_jax.constraints.host_work import RowWork, Works
from medusa_jax.errors import UserError, first_line

# Seconds that a step waits for threads; rows whose work is late skip the step.
WAIT_SECONDS = 0.02


def fill(work: RowWork) -> None:
    """Do a row's work; an error is stored in the guide."""
    try:
        work.fill()
    # A panic of the grammar engine is not an `Exception`.
    except BaseException as error:
        prefix = "" if isinstance(error, UserError) else "the grammar engine failed: "
        work.stuck, work.guide.error = True, f"{prefix}{first_line(error)}"


class GuideThreads:
    """Runs the work of rows in threads. The row's next step uses work that came late.

    Threads use half of the cores, so steps continue while one computes for seconds.

    Args:
      wake: called when a row's work is done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool, self._wake = ThreadPoolExecutor(threads, "guides"), wake

    def filled(self, works: Works) -> Works:
        """Start the work; return the rows whose work is ready in time."""
        for work in works.values():
            begun = work.guide.begun
            if not begun or not work.repeats(begun[0]):
                end = self._pool.submit(fill, work)
                work.guide.begun = work, end
                end.add_done_callback(lambda _: self._wake())
        wait([work.guide.begun[1] for work in works.values()], WAIT_SECONDS)
        ready = {}
        for row, work in works.items():
            begun, end = work.guide.begun
            if end.done():
                ready[row], work.guide.begun = begun, None
        return ready

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        return bool(guide.begun and not guide.begun[1].done())

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
