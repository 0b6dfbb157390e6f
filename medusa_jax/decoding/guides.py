"""The host's part in the steps of rows with constraints, in place or in threads."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from medusa_jax.errors import UserError

# Seconds that a step waits for threads; rows whose work is late skip the step.
PATIENCE = 0.02


class Guide(Protocol):
    """The host's side of one row's constraint.

    Attributes:
      consumed: number of emitted tokens that it has read.
      first_W: bits of the tokens that may come first.
      patience: seconds left for computing slow sets of tokens.
      error: why its text cannot continue, if a thread failed.
    """

    consumed: int
    first_W: np.ndarray
    patience: float
    error: str

    def advance(self, tokens: Sequence[int]) -> None:
        """Read the next tokens of the text."""

    def fill(self, into_W: np.ndarray) -> bool:
        """Write the bits of the tokens that may follow; False if there are none.

        Raises:
          UserError: a limit was reached before the set was complete.
        """

    def replace_forbidden(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], guesses_MK: np.ndarray
    ) -> None:
        """Replace drafts that may not follow their parents, by forced tokens or by guesses."""

    def fill_tree(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], into_MW: np.ndarray
    ) -> None:
        """Write the bits after each node of a tree except the root, which are already written."""


class RowWork:
    """The host's part in one step of one row.

    Args:
      guide: the row's guide.
      tokens: new tokens of its text.
      nodes_M: tokens of its tree, as drafted; `replace` changes the forbidden ones.
      children: the children of each node.
      guesses_MK: as for `Guide.replace_forbidden`; None keeps forbidden drafts.
      allowed_MW: output, the bits of the tokens that may follow each node.

    Attributes:
      stuck: no token may follow the text, or the guide failed.
    """

    def __init__(
        self,
        guide: Guide,
        tokens: Sequence[int],
        nodes_M: np.ndarray,
        children: Sequence[Sequence[int]],
        guesses_MK: np.ndarray | None,
        allowed_MW: np.ndarray,
    ) -> None:
        self.guide, self.nodes_M, self.allowed_MW = guide, nodes_M, allowed_MW
        self._tokens, self._drafted_M = tokens, nodes_M.copy()
        self._children, self._guesses_MK = children, guesses_MK
        self.stuck = False
        self.replaced, self.filled = Event(), Event()

    def replace(self) -> None:
        """Advance the guide and replace the drafts that it forbids."""
        self.guide.advance(self._tokens)
        if self._guesses_MK is not None:
            self.guide.replace_forbidden(self.nodes_M, self._children, self._guesses_MK)

    def fill(self) -> None:
        """Compute the bits after the root and after each node."""
        self.stuck = not self.guide.fill(self.allowed_MW[0])
        if not self.stuck:
            self.guide.fill_tree(self.nodes_M, self._children, self.allowed_MW)

    def run(self, part: Callable[[], None], done: Event) -> None:
        """Run `replace` or `fill` in a thread; an error is stored in the guide."""
        try:
            if part != self.replace:
                self.replaced.wait()
            if not self.stuck:
                part()
        except (
            BaseException
        ) as error:  # a panic of the grammar engine is not an `Exception`
            what = "" if isinstance(error, UserError) else "the grammar engine failed: "
            self.stuck, self.guide.error = True, f"{what}{error}".partition("\n")[0]
        done.set()

    def repeats(self, earlier: "RowWork") -> bool:
        """Whether an earlier work has the same tree after the same text."""
        same = self._children is earlier._children
        return same and np.array_equal(self._drafted_M, earlier._drafted_M)


Works = Mapping[int, RowWork]


def in_place(works: Works, part: Callable[[RowWork], None]) -> Works:
    """Run one part of every row's work in this thread."""
    for work in works.values():
        part(work)
    return works


class GuideThreads:
    """Runs the work of rows in threads. The row's next step uses work that came late.

    Threads use half of the cores, so steps continue while one computes for seconds.

    Args:
      wake: called when a row's work is done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool, self._wake = ThreadPoolExecutor(threads, "guides"), wake
        self._works: WeakKeyDictionary[Guide, RowWork] = WeakKeyDictionary()

    def replaced(self, works: Works) -> Works:
        """Start the work of all rows; returns the rows whose nodes are ready in time."""
        new = []
        for work in works.values():
            earlier = self._works.get(work.guide)
            if not earlier or not work.repeats(earlier):
                self._works[work.guide] = work
                new.append(work)
        for work in new:
            self._pool.submit(work.run, work.replace, work.replaced)
        for work in new:  # while the device verifies
            filling = self._pool.submit(work.run, work.fill, work.filled)
            filling.add_done_callback(lambda _: self._wake())
        works = {row: self._works[work.guide] for row, work in works.items()}
        return self._in_time(works, [work.replaced for work in works.values()])

    def filled(self, works: Works) -> Works:
        """Return the rows whose bits are ready in time."""
        ready = self._in_time(works, [work.filled for work in works.values()])
        for work in ready.values():
            del self._works[work.guide]
        return ready

    @staticmethod
    def _in_time(works: Works, events: Sequence[Event]) -> Works:
        deadline = time.monotonic() + PATIENCE
        ready = [event.wait(max(0.0, deadline - time.monotonic())) for event in events]
        return {row: work for (row, work), done in zip(works.items(), ready) if done}

    def late(self, guide: Guide) -> bool:
        """Whether a row's work is unfinished, so that it cannot take a step yet."""
        work = self._works.get(guide)
        return work is not None and not work.filled.is_set()

    def close(self) -> None:
        """Cancel work that has not started."""
        self._pool.shutdown(wait=False, cancel_futures=True)
