"""Time of a step by the number of rows and the nodes of the tree, measured while text is decoded.

It depends on what else the machine is doing, so it is measured on chunks whose steps all take one size of the tree.
Streams of a gated engine (`gate.py`) and servers (`serving/ladder.py`) choose sizes by it. A size that was
not timed lately is taken for one chunk. Later processes go on with a note of the times, so that short texts need not
time sizes anew.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.state import Progress
from medusa_jax.tree.tree import Tree

# Chunks that a time is computed from: their lower quartile, since other work only adds time.
TIMED = 16
# The largest share of the time that timing may lose. After its first SOON chunks a size is timed once in PAUSE seconds.
OVERHEAD, PAUSE, SOON = 0.004, 1.0, 4
# A stream's chunk that times a size has FEW steps and loses this share of its time. A wait of the host shorter than
# WAITED seconds means that the chunk had already ended.
FEW, LOST, WAITED = 8, 0.25, 1e-4
# Seconds of chunks after which the note is written again.
NOTED = 10.0


class Note(Protocol):
    """What later processes read (`measured.DeviceCache`)."""

    def read(self) -> dict[str, Any]: ...
    def write(self, note: dict[str, Any]) -> None: ...


class StepCosts:
    """Seconds of a step with B rows and M nodes.

    More rows or nodes never take less time, nor more than in proportion; a size that was not measured is expected in
    the middle of the bounds that measured ones set.

    Args:
      note: of earlier processes' times, which are scaled to this one's pace.

    Attributes:
      elapsed: seconds of all chunks.
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
        """Seconds of a step: until this process has timed `SOON` chunks, the note's, scaled to this process's pace."""
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


class ChunkClock:
    """Times the chunks of a stream.

    A chunk begins when it is sent or when the one before it ends, whichever is later. `see` is called right after a chunk is
    sent and waits for the one before it, so it returns when the new chunk begins. A chunk's end is known only if the host waited for it.

    Args:
      sizes: of the gated engine.

    Attributes:
      costs: as given.
      steps: of the next chunk if it takes one size, else None.
    """

    def __init__(self, costs: StepCosts, rows: int, sizes: Sequence[Tree]) -> None:
        self.costs, self._rows = costs, rows
        self._nodes_N = [tree.n_nodes for tree in sizes]
        self.steps: int | None = None
        self._began: float = np.nan
        self._steps_N = np.zeros(len(sizes), np.int32)
        # Whether each chunk that was sent and not seen was timed; the choice after the last one that was not.
        self._timed = deque([False])
        self._choice: dict[str, np.ndarray] = {"rest_1": np.zeros(1, np.int32)}

    def size_to_time(self) -> int | None:
        """The size that the next chunk has to take, None if it is free."""
        for size, nodes in enumerate(self._nodes_N):
            lost = LOST * FEW * self.costs.estimate(self._rows, nodes)
            if self.costs.is_due(self._rows, nodes, lost):
                self.costs.use(self._rows, nodes)
                return size
        return None

    def gate_of_next(self, gate: Gate) -> Gate:
        """The gate of the next chunk: with the times so far, or with the size that has to be timed."""
        was_timed, size = self._timed[-1], self.size_to_time()
        self.steps = None if size is None else FEW
        self._timed.append(size is not None)
        if size is not None:
            return gate.always(size)
        choice = self._choice if was_timed else {}
        ratio_N = self.costs.ratios(self._rows, self._nodes_N)
        return gate.replace(ratio_N=ratio_N, **choice)

    def see(self, progress: Progress) -> None:
        """Wait for the end of the chunk before the last one that was sent, and learn from it."""
        assert progress.gate is not None
        began = time.perf_counter()
        steps_N, now = np.asarray(progress.gate.steps_N), time.perf_counter()
        ended = now if now - began > WAITED else np.nan
        taken_N, seconds = steps_N - self._steps_N, ended - self._began
        if np.count_nonzero(taken_N) == 1 and not np.isnan(seconds):
            nodes = self._nodes_N[int(taken_N.argmax())]
            self.costs.add(self._rows, nodes, seconds, int(taken_N.sum()))
        else:
            self.costs.elapsed += float(np.nan_to_num(seconds))
        self._began, self._steps_N = now, steps_N
        if not self._timed.popleft():
            names = "index_1", "rest_1", "lost_1"
            self._choice = {n: np.asarray(getattr(progress.gate, n)) for n in names}
