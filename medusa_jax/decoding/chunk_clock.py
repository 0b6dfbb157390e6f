"""Time the chunks of a stream, whose steps choose sizes of the tree."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from medusa_jax.decoding.state import Progress
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import Gate
from medusa_jax.tree.tree import Tree

# A chunk that times a size has FEW steps and loses this share of its time. A wait of the host shorter than
# WAITED seconds means that the chunk had already ended.
FEW, LOST, WAITED = 8, 0.25, 1e-4


class ChunkClock:
    """Times the chunks of a stream.

    A chunk begins when it is sent or when the one before it ends, whichever is later. `see` is called right after a chunk is
    sent and waits for the one before it, so it returns when the new chunk begins. A chunk's end is known only if the host waited for it.

    Args:
      sizes: of the gated engine.

    Attributes:
      costs: as given.
      steps: number of steps of the next chunk if it times a size, else None.
    """

    def __init__(self, costs: StepCosts, rows: int, sizes: Sequence[Tree]) -> None:
        self.costs, self._rows = costs, rows
        self._nodes_N = [tree.n_nodes for tree in sizes]
        self.steps: int | None = None
        self._began: float = np.nan
        self._steps_N = np.zeros(len(sizes), np.int32)
        # For each chunk sent but not read: whether it is timed. Then the gate's choice after the last chunk that was
        # not timed.
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
        """Wait until the chunk before the last one that was sent has ended, and note its time."""
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
