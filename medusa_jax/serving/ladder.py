"""Choose the draft tree's size for a chunk: the one with the most tokens per second for the rows that run now.

The more rows step together, the more a drafted token costs. A *ladder* has several sizes of one ordered tree, plain
decoding first. A size's tokens per second come from:

- Tokens per step: the formula of `decoding/tree_size/rates.py` for the drafts that each request has accepted so far. A request
  begins with the shares of earlier ones, and the first one with the tree file's evidence.
- Time of a step: measured (`decoding/tree_size/costs.py`).

Texts and machines change, so a chunk sometimes tries the next size.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from medusa_jax.api import Model
from medusa_jax.decoding.tree_size.costs import StepCosts
from medusa_jax.decoding.tree_size.gate import MARGIN
from medusa_jax.decoding.tree_size.rates import (
    PRIOR,
    RECENT,
    first_counts,
    rates_of,
    tokens_by_size,
)
from medusa_jax.tree.tree import Tree

# Seconds of a chunk and between the pieces of a stream: shorter ones only cost dispatches.
PACE = 0.04
# Half-life of the shares of all requests, in steps with drafts; one request's is `RECENT`.
ALL_RECENT = 16 * RECENT
# A gap in the drafter's state costs about this share of a chunk.
GAP = 0.5
# A size is compiled if it is faster by this factor.
WORTH = 1.05


def ladder_sizes(model: Model, trees: Sequence[Tree]) -> tuple[Tree, ...]:
    """Sizes to choose from, ascending: 1, 2, 4, ... nodes of one order, and these trees; one if there is no choice."""
    if not (model.trees.chooses and model.has_drafter):
        return (Tree.none(),)
    order = model.trees.order(max(trees, key=lambda tree: tree.n_nodes))
    most = min(model.llama.kernels.largest_tree, len(order.growth) + 1)
    sizes = [order.tree(2**n) for n in range(most.bit_length())]
    sizes = [tree for tree in sizes if tree.drafted.depth <= model.drafter.n_heads]
    by_nodes = {tree.n_nodes: tree for tree in (*sizes, *trees)}
    return tuple(by_nodes[n] for n in sorted(by_nodes))


class Ladder:
    """The choice among N sizes.

    Args:
      sizes: as from `ladder_sizes`.
      tokens: tokens per step with each, from a tree file's evidence.

    Attributes:
      costs: times of steps by the rows' group; the caller records them.
    """

    def __init__(self, sizes: Sequence[Tree], tokens: Sequence[float] | None) -> None:
        self._nodes, self._depths = [t.n_nodes for t in sizes], [t.depth for t in sizes]
        self._rate_N = rates_of(tokens, self._depths)
        self.costs = defaultdict[Hashable, StepCosts](StepCosts)
        self._all_3L = np.stack(first_counts(self._rate_N, max(self._depths)))
        # By group and number of rows, the index of the last choice.
        self._chosen: dict[Hashable, int] = {}

    def begin(self) -> np.ndarray:
        """The counts [3, L] of a request before its first step."""
        return self._all_3L * (PRIOR / self._all_3L[1, 0])

    def count(
        self, counts_3L: np.ndarray, steps_L: np.ndarray, nodes: int, has_gap: bool
    ) -> None:
        """Add a request's steps that appended 1, 2, ... tokens to its counts, in place, and to those of all.

        Args:
          has_gap: its drafter has not read all of the text, so it is no example for others.
        """
        index = self._nodes.index(nodes)
        depth = min(self._depths[index], len(steps_L) - 1)
        at_least_L = np.cumsum(steps_L[::-1])[::-1]
        new_3L = np.zeros_like(counts_3L)
        new_3L[0, :depth] = at_least_L[1 : depth + 1]
        new_3L[1, :depth] = at_least_L[:depth]
        new_3L[2] = new_3L[1] * self._rate_N[index]
        for counts, recent in ((counts_3L, RECENT), (self._all_3L, ALL_RECENT)):
            if counts is counts_3L or not has_gap:
                counts *= 0.5 ** (new_3L[1, 0] / recent)
                counts += new_3L

    def choose(
        self,
        group: Hashable,
        rows: int,
        first: int,
        counts_R3L: Sequence[np.ndarray],
        ready: Sequence[int],
    ) -> tuple[int, int]:
        """Return the nodes of the next chunk's tree, and of the fastest one, which may lack programs.

        Args:
          first: nodes of the size to take until a chunk of it has been timed.
          counts_R3L: of the requests that step.
          ready: nodes of the sizes that have programs, `first` among them.
        """
        costs = self.costs[group]
        if not costs.chunks(rows, first):
            return first, first
        seconds_N = [costs.estimate(rows, nodes) for nodes in self._nodes]
        counts_3RL = np.stack(counts_R3L, axis=1)
        tokens_RN = tokens_by_size(counts_3RL, self._rate_N, self._depths, np)
        speed_N = tokens_RN.mean(axis=0) / np.array(seconds_N)
        last = self._chosen.get((group, rows), self._nodes.index(first))
        speed_N[last] *= MARGIN
        usable = [self._nodes.index(nodes) for nodes in sorted(ready)]
        best = max(usable, key=speed_N.__getitem__)
        self._chosen[group, rows] = best
        fastest = int(np.argmax(speed_N))
        if speed_N[fastest] < WORTH * speed_N[best]:
            fastest = best
        place = usable.index(best)
        for other in (*usable[place + 1 : place + 2], *usable[max(0, place - 1) : place]):
            nodes = self._nodes[other]
            lost = 1 - speed_N[other] / speed_N[best] + GAP * (nodes == 1)
            if costs.is_due(rows, nodes, PACE * lost):
                best = other
                break
        costs.use(rows, self._nodes[best])
        return self._nodes[best], self._nodes[fastest]
