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

# Seconds that a step waits for threads; rows whose work is late sit it out.
PATIENCE = 0.02


class Guide(Protocol):
    """The host's side of one row's constraint.

    Attributes:
      consumed: number of emitted tokens that it has read.
      first_W: bits of the tokens that may come first.
      patience: seconds that slow sets of tokens may take in all.
      error: why its text cannot be continued, if threads found that.
    """

    consumed: int
    first_W: np.ndarray
    patience: float
    error: str

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the next tokens of the text."""

    def fill(self, into_W: np.ndarray) -> bool:
        """Write the bits of the tokens that may follow; False if there are none.

        Raises:
          UserError: a limit was met, and what may follow is not known.
        """

    def replace_forbidden(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], guesses_MK: np.ndarray
    ) -> None:
        """Replace drafts that may not follow their parents, by forced tokens or by guesses."""

    def fill_tree(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], into_MW: np.ndarray
    ) -> None:
        """Write the bits after each node of a tree; those after the root are there."""


class RowWork:
    """The host's part in one step of one row.

    Args:
      guide: of the row.
      tokens: the new ones of its text.
      nodes_M: tokens of its tree; as drafted at first, then without forbidden drafts.
      children: of each node.
      guesses_MK: as for `Guide.replace_forbidden`; None: forbidden drafts stay.
      allowed_MW: the bits of the tokens that may follow each node are written here.

    Attributes:
      stuck: no token may follow the text, or which ones is not known.
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
        """One of the two, in a thread; an error is the guide's."""
        try:
            if part != self.replace:
                self.replaced.wait()
            if not self.stuck:
                part()
        except BaseException as error:  # a panic of the grammar engine is no `Exception`
            what = "" if isinstance(error, UserError) else "the grammar engine failed: "
            self.stuck, self.guide.error = True, f"{what}{error}".partition("\n")[0]
        done.set()

    def repeats(self, earlier: "RowWork") -> bool:
        """Whether an earlier one was for the same tree after the same text."""
        same = self._children is earlier._children
        return same and np.array_equal(self._drafted_M, earlier._drafted_M)


Works = Mapping[int, RowWork]


def in_place(works: Works, part: Callable[[RowWork], None]) -> Works:
    """Do a part of all."""
    for work in works.values():
        part(work)
    return works


class GuideThreads:
    """The work of rows in threads. What is late is used by the next step of its row.

    Threads take half of the cores, so that steps go on while they compute for seconds.

    Args:
      wake: called when work is done.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        threads = max(1, (os.cpu_count() or 1) // 2)
        self._pool, self._wake = ThreadPoolExecutor(threads, "guides"), wake
        self._works: WeakKeyDictionary[Guide, RowWork] = WeakKeyDictionary()

    def replaced(self, works: Works) -> Works:
        """Begin all; returns those whose nodes are ready in time."""
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
        """Those whose bits are ready in time."""
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
        """Whether a row cannot take a step yet."""
        work = self._works.get(guide)
        return work is not None and not work.filled.is_set()

    def close(self) -> None:
        """Do nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
