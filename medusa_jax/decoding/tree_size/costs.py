"""Time of a step by the number of rows and the nodes of the tree, measured while text is decoded.

It depends on what else the machine is doing, so it is measured on chunks whose steps all take one size of the tree.
Streams of a gated engine (`gate.py`, `chunk_clock.py`) and servers (`serving/ladder.py`) choose sizes by it. A size
whose time is old is taken for one chunk, which times it again. The times are noted for later processes, so that short
texts need not measure them.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

# Chunks that a time is computed from: their lower quartile, since other work only adds time.
TIMED = 16
# The largest share of the time that timing may lose. After its first SOON chunks a size is timed once in PAUSE seconds.
OVERHEAD, PAUSE, SOON = 0.004, 1.0, 4
# Seconds of chunks after which the note is written again.
NOTED = 10.0


class Note(Protocol):
    """What later processes read (`measured.DeviceCache`)."""

    def read(self) -> dict[str, Any]: ...
    def write(self, note: dict[str, Any]) -> None: ...


class StepCosts:
    """Seconds of a step with B rows and M nodes.

    A step with more rows or nodes takes at least as long, and at most longer in proportion. These are the bounds of a
    size that was not measured; its estimate is their middle.

    Args:
      note: of earlier processes' times, which are scaled to this one's pace.

    Attributes:
      elapsed: seconds of all chunks: `add` adds a chunk of one size, `ChunkClock` one of several.
    """

    def __init__(self, note: Note | None = None) -> None:
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        # The value of `elapsed` when a size was last used.
        self.elapsed, self._used = 0.0, dict[tuple[int, int], float]()
        self._note, self._noted = note, -np.inf
        self._before: dict[tuple[int, int], float] = {}
        with suppress(TypeError, ValueError):  # a note of another version
            for B, M, seconds, unused in note.read().get("sizes", ()) if note else ():
                self._before[B, M], self._used[B, M] = float(seconds), -float(unused)

    def keep(self) -> None:
        """Write the note, unless that was done within the last `NOTED` seconds of chunks."""
        if self._note and self.elapsed > self._noted + NOTED:
            self._noted = self.elapsed
            sizes = [
                (*size, self.measured(*size), self.elapsed - self._used[size])
                for size in self._seconds.keys() | self._before.keys()
            ]
            self._note.write({"sizes": sizes})

    def add(self, rows: int, nodes: int, seconds: float, steps: int = 1) -> None:
        """Record the time of a chunk whose steps all had this size."""
        timed = self._seconds.setdefault((rows, nodes), deque(maxlen=TIMED))
        timed.append(max(1e-6, seconds / steps))
        self.elapsed += seconds
        self.use(rows, nodes)

    def chunks(self, rows: int, nodes: int) -> int:
        """Number of chunks that were timed; a size that earlier processes timed has `TIMED` more."""
        before = TIMED if (rows, nodes) in self._before else 0
        return before + len(self._seconds.get((rows, nodes), ()))

    def measured(self, rows: int, nodes: int) -> float | None:
        """Seconds of a step: this process's; before it has timed `SOON` chunks of this size, the note's, if it has the
        size, scaled to this process's pace.
        """
        size, now = (rows, nodes), self._now(rows, nodes)
        if size not in self._before or len(self._seconds.get(size, ())) >= SOON:
            return now
        both = self._before.keys() & self._seconds.keys()
        paces = [(self._now(*one) or 0.0) / self._before[one] for one in both]
        return self._before[size] * float(np.median(paces or [1.0]))

    def _now(self, rows: int, nodes: int) -> float | None:
        timed = sorted(self._seconds.get((rows, nodes), ()))
        return timed[len(timed) // 4] if timed else None

    def estimate(self, rows: int, nodes: int) -> float:
        """The measured time, else the middle of its bounds; 1 if nothing was measured."""
        least, most = 0.0, np.inf
        for B, M in self._seconds.keys() | self._before.keys():
            seconds, ratio = self.measured(B, M), rows * nodes / (B * M)
            if (rows - B) * (nodes - M) >= 0 and seconds:
                least = max(least, seconds * min(1.0, ratio))
                most = min(most, seconds * max(1.0, ratio))
        middle = float(np.sqrt(least * max(least, most))) if least else 1.0
        return self.measured(rows, nodes) or middle

    def ratios(self, rows: int, nodes_N: Sequence[int]) -> np.ndarray:
        """Times with these numbers of nodes, ascending, over the first one's."""
        seconds_N = [self.estimate(rows, nodes) for nodes in nodes_N]
        return np.maximum.accumulate(seconds_N).astype(np.float32) / seconds_N[0]

    def use(self, rows: int, nodes: int) -> None:
        """Record that a chunk takes this size."""
        self._used[rows, nodes] = self.elapsed

    def is_due(self, rows: int, nodes: int, lost: float) -> bool:
        """Whether to time this size now, which costs `lost` seconds: after the first two times it is done less often."""
        share = np.clip((self.chunks(rows, nodes) - 1) / SOON, 0, 1)
        since = self.elapsed - self._used.get((rows, nodes), -np.inf)
        return bool(since > share * max(PAUSE, lost / OVERHEAD))
