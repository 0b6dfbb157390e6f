"""Time of a step with each size of a gated engine, measured while text is decoded.

What a size costs depends on what else the machine does, so it is measured on the steps themselves: a chunk of n_i
steps with size i takes sum n_i c_i seconds. Least squares over the latest chunks give the c_i; a size that was not
timed lately is taken for one short chunk.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from medusa_jax.decoding.gate import Gate
from medusa_jax.decoding.state import Progress

# Steps of a chunk that times a size, and seconds from which the host has waited.
FEW, WAITED = 8, 1e-4
# Weight of older chunks for each new one, of the ratios so far, and recent steps of a size that are enough.
KEEP, PRIOR, ENOUGH = 0.9, 0.1, 4.0


class StepCosts:
    """Times of N sizes, plain decoding first.

    Attributes:
      ratio_N: time of a step with each over a plain step's, ascending; at first a guess.
    """

    def __init__(self, ratio_N: Sequence[float]) -> None:
        self.ratio_N = np.array(ratio_N, np.float32)
        self._timed_N = np.zeros(len(ratio_N))
        self._seen_N = np.zeros(len(ratio_N), bool)
        self._squares_NN, self._sums_N = np.diag(self._timed_N), self._timed_N.copy()

    def to_time(self) -> int | None:
        """The size that the next chunk has to take, None if it is free."""
        index = int(np.argmin(self._timed_N))
        return index if self._timed_N[index] < ENOUGH else None

    def add(self, steps_N: np.ndarray, seconds: float) -> None:
        """Learn from a chunk: its steps by size, and its time, NaN if it is not known.

        Minimises the squares of (sum n_i c_i) / seconds - 1, and of what c_i differs from its ratio so far.
        """
        are_new = (steps_N > 0) & ~self._seen_N
        self._seen_N |= are_new
        if are_new.any():
            return  # it also waited for memory
        self._timed_N = KEEP * self._timed_N + steps_N
        if np.isnan(seconds):
            return
        share_N, rate = steps_N / seconds, steps_N.sum() / seconds
        self._squares_NN = KEEP * self._squares_NN + np.outer(share_N, share_N)
        self._sums_N = KEEP * self._sums_N + share_N
        known_NN = np.eye(len(steps_N))
        known_NN[:, 0] -= self.ratio_N
        prior_NN = PRIOR * rate**2 * known_NN.T @ known_NN
        seconds_N = np.linalg.solve(self._squares_NN + prior_NN, self._sums_N)
        if (seconds_N > 0).all():
            # More nodes never take less time: else noise decided.
            ratio_N = np.maximum.accumulate(seconds_N / seconds_N[0])
            self.ratio_N = ratio_N.astype(np.float32)


class ChunkClock:
    """Times the chunks of a stream.

    The chunk under way began when the one before it ended, so a time is known only if the host waited for both ends.

    Attributes:
      steps: of the next chunk if it takes one size, else None.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.steps: int | None = None
        self._ended: float = np.nan
        self._steps_N: np.ndarray | None = None
        # Whether each chunk that was sent and not seen was timed; the choice after the last one that was not.
        self._timed = deque([False])
        self._choice: dict[str, np.ndarray] = {"rest_1": np.zeros(1, np.int32)}

    def gate_of_next(self, gate: Gate) -> Gate:
        """The gate of the next chunk: with the times so far, or with the size that has to be timed."""
        was_timed, size = self._timed[-1], self.costs.to_time()
        self.steps = None if size is None else FEW
        self._timed.append(size is not None)
        if size is not None:
            return gate.always(size)
        choice = self._choice if was_timed else {}
        return gate.replace(ratio_N=self.costs.ratio_N, **choice)

    def see(self, progress: Progress) -> None:
        """Wait for the end of the chunk before the last one that was sent, and learn from it."""
        assert progress.gate is not None
        began, steps_N = time.perf_counter(), np.asarray(progress.gate.steps_N)
        now = time.perf_counter()
        ended = now if now - began > WAITED else np.nan
        if self._steps_N is not None and (steps_N > self._steps_N).any():
            self.costs.add(steps_N - self._steps_N, ended - self._ended)
        self._ended, self._steps_N = ended, steps_N
        if not self._timed.popleft():
            choice = {name: getattr(progress.gate, name) for name in ("index_1", "rest_1")}
            self._choice = {name: np.asarray(x) for name, x in choice.items()}
