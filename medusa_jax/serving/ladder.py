"""Choose the size of the draft tree for a chunk of steps, by acceptance and cost under the present load.

The more rows step together, the more a drafted token costs. The *ladder* has several sizes of one ordered tree,
plain decoding first. A chunk takes the size with the most tokens per time for the rows that run now:

- Tokens per step: by the formula of `decoding/gate.py`, from the drafts that each request accepted so far. A
  request begins with the shares of earlier ones, and the first with the tree file's evidence.
- Time of a step: measured. A pass of more rows or nodes takes no less time, and no more than in proportion to its
  tokens; within the bounds that all measured passes set, an unmeasured one is taken to be in the middle.

Text and machine change, so sizes next to the chosen one are tried again at times, for one chunk.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from medusa_jax.decoding.gate import (
    MARGIN,
    PRIOR,
    RECENT,
    rate_of,
    tokens_by_size,
    usual_tokens,
)
from medusa_jax.tree.tree import Tree

# Half-life of the shares of all requests, in steps; those of one request have `RECENT`.
ALL_RECENT = 16 * RECENT
# Timed chunks that a time is computed from: their lower quartile, since other work only adds time.
TIMED = 16
# Trials of a size lose this share of the time, and are at least this many seconds apart. A plain chunk counts as
# lost: the drafter misses its text.
OVERHEAD, PAUSE, GAP = 0.004, 1.0, 0.5
# A size that is faster by this factor is compiled.
WORTH = 1.05


class Times:
    """Time of a step by a kind of rows (their group), the number of rows, and nodes of the tree."""

    def __init__(self) -> None:
        self._timed: dict[tuple[Hashable, int, int], deque[float]] = {}

    def note(self, kind: Hashable, rows: int, nodes: int, seconds: float) -> None:
        """Record the time of a chunk's steps, their mean."""
        timed = self._timed.setdefault((kind, rows, nodes), deque(maxlen=TIMED))
        timed.append(max(seconds, 1e-6))

    def count(self, kind: Hashable, rows: int, nodes: int) -> int:
        """The number of timed chunks that its time is computed from."""
        return len(self._timed.get((kind, rows, nodes), ()))

    def measured(self, kind: Hashable, rows: int, nodes: int) -> float | None:
        timed = self._timed.get((kind, rows, nodes))
        return sorted(timed)[len(timed) // 4] if timed else None

    def estimate(self, kind: Hashable, rows: int, nodes: int) -> float | None:
        """The measured time, else the middle of its bounds; None if nothing of this kind is measured."""
        least, most = 0.0, np.inf
        for other, B, M in self._timed:
            seconds = self.measured(other, B, M)
            if other != kind or seconds is None:
                continue
            if (rows, nodes) == (B, M):
                return seconds
            ratio = rows * nodes / (B * M)
            if rows >= B and nodes >= M:
                least, most = max(least, seconds), min(most, seconds * ratio)
            elif rows <= B and nodes <= M:
                least, most = max(least, seconds * ratio), min(most, seconds)
        if not least:
            return None
        return float(np.sqrt(least * max(least, most)))


class Ladder:
    """The choice among N sizes.

    Args:
      sizes: first nodes of one order, ascending, plain decoding first.
      tokens: tokens per step with each, from a tree file's evidence.
      times: of steps, which the caller records.
      pace: seconds of a chunk.
    """

    def __init__(
        self,
        sizes: Sequence[Tree],
        tokens: Sequence[float] | None,
        times: Times,
        pace: float,
    ) -> None:
        self.sizes, self.nodes = tuple(sizes), [tree.n_nodes for tree in sizes]
        self._times, self._depths = times, [tree.depth for tree in sizes]
        tokens = tokens or usual_tokens(self._depths)
        self._rate_N = np.array([rate_of(*pair) for pair in zip(tokens, self._depths)])
        rate = self._rate_N[-1]
        first_L = PRIOR * (np.arange(max(self._depths)) == 0)
        self._all_3L = np.stack([first_L * rate, first_L, first_L * rate])
        self._chosen: dict[tuple[Hashable, int], int] = {}
        self._pace = pace
        self._tried: dict[tuple[Hashable, int, int], float] = {}

    def begin(self) -> np.ndarray:
        """The counts [3, L] of a request before its first step."""
        return self._all_3L * (PRIOR / self._all_3L[1, 0])

    def count(
        self, counts_3L: np.ndarray, steps_L: np.ndarray, nodes: int, is_gap: bool
    ) -> None:
        """Add a request's steps with one size to its counts, in place, and to those of all.

        Args:
          steps_L: steps that appended 1, 2, ... tokens.
          is_gap: its drafter lacks a part of the text, so that other requests learn nothing from it.
        """
        index = self.nodes.index(nodes)
        least_L = np.cumsum(steps_L[::-1])[::-1]  # steps that appended at least so many
        tested_L = np.zeros(counts_3L.shape[1])
        accepted_L = np.zeros_like(tested_L)
        for level in range(min(self._depths[index], len(steps_L) - 1)):
            tested_L[level], accepted_L[level] = least_L[level], least_L[level + 1]
        new_3L = np.stack([accepted_L, tested_L, tested_L * self._rate_N[index]])
        for counts, recent in ((counts_3L, RECENT), (self._all_3L, ALL_RECENT)):
            if tested_L[0] and not (counts is self._all_3L and is_gap):
                counts *= 0.5 ** (tested_L[0] / recent)
                counts += new_3L

    def choose(
        self,
        kind: Hashable,
        rows: int,
        counts_R3L: Sequence[np.ndarray],
        first: int,
        ready: Callable[[int], bool],
        now: float,
    ) -> tuple[int, int]:
        """Return the nodes of the next chunk's tree, and of the fastest one, which may lack programs.

        Args:
          kind, rows: as for `Times`.
          counts_R3L: of the requests that step.
          first: nodes to begin with.
          ready: whether the tree of this size has programs.
          now: seconds of a clock.
        """
        seconds = [self._times.estimate(kind, rows, nodes) for nodes in self.nodes]
        if self._times.measured(kind, rows, first) is None:
            return first, first
        counts_3RL = np.stack(counts_R3L, axis=1)
        tokens_RN = tokens_by_size(counts_3RL, self._rate_N, self._depths, np)
        speed_N = tokens_RN.mean(axis=0) / np.array(seconds, float)
        usable = [index for index, nodes in enumerate(self.nodes) if ready(nodes)]
        last = self._chosen.get((kind, rows), self.nodes.index(first))
        favoured_N = np.where(np.arange(len(speed_N)) == last, MARGIN, 1.0) * speed_N
        best = max(usable, key=lambda index: favoured_N[index])
        self._chosen[kind, rows] = best
        fastest = int(np.argmax(speed_N))
        if speed_N[fastest] < WORTH * speed_N[best]:
            fastest = best
        place = usable.index(best)
        for other in (*usable[place + 1 : place + 2], *usable[max(0, place - 1) : place]):
            lost = 1 - speed_N[other] / speed_N[best] + (0.0 if other else GAP)
            pause = max(PAUSE, self._pace * lost / OVERHEAD)
            pause *= self._times.count(kind, rows, self.nodes[other]) / TIMED
            if now - self._tried.get((kind, rows, other), -np.inf) > pause:
                best = other
                break
        self._tried[kind, rows, best] = now
        return self.nodes[best], self.nodes[fastest]
