"""The host's part in the steps of rows with constraints."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from medusa_jax.constraints.guide import Guide


class RowWork:
    """The host's part in one step of one row.

    Args:
      guide: the row's guide.
      tokens: new tokens of its text.
      nodes_M: the drafted tree, the root first.
      children: of each node.
      chain_C: nodes of the chain for forced tokens.
      guesses_MK: tokens that are likely after each node; None replaces no drafts.
      allowed_MW: bits of the tokens that may follow each node, to be written.

    Attributes:
      stuck: no token may follow the text, or the guide failed.
      forced: number of tokens of the chain that are forced.
    """

    def __init__(
        self,
        guide: Guide,
        tokens: Sequence[int],
        nodes_M: np.ndarray,
        children: Sequence[Sequence[int]],
        chain_C: np.ndarray,
        guesses_MK: np.ndarray | None,
        allowed_MW: np.ndarray,
    ) -> None:
        self.guide, self.nodes_M, self.allowed_MW = guide, nodes_M, allowed_MW
        self._tokens, self._drafted_M = tokens, nodes_M.copy()
        self._children, self._chain_C, self._guesses_MK = children, chain_C, guesses_MK
        self.stuck, self.forced = False, 0

    def fill(self) -> None:
        """Advance the guide, draft by it, and compute the bits after the root and after each node."""
        self.guide.advance(self._tokens)
        self.stuck = not self.guide.fill(self.allowed_MW[0])
        if self.stuck:
            return
        if self._guesses_MK is not None and self._chain_C.size:
            self.forced = self.guide.fill_chain(self.nodes_M, self._chain_C)
        self.guide.fill_tree(
            self.nodes_M, self._children, self._guesses_MK, self.allowed_MW
        )

    def repeats(self, work: "RowWork") -> bool:
        """Whether an earlier work has the same tree after the same text."""
        same_tree = self._children == work._children
        return same_tree and np.array_equal(self._drafted_M, work._drafted_M)


Works = Mapping[int, RowWork]
# Does the work of rows; returns those whose work is ready in time.
FillWorks = Callable[[Works], Works]


def fill_all(works: Works) -> Works:
    """Do the work of rows in the calling thread."""
    for work in works.values():
        work.fill()
    return works
