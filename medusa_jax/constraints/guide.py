"""The tokens that a constraint leaves to one text, and down the paths of a tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Every token is allowed.
ALL = np.uint32(0xFFFFFFFF)


class MatcherGuide:
    """A text's place in its grammar (`decoding.constrained.Guide`).

    Args:
      matcher: llguidance's, of an empty text.
      ordinary_W: bits of the tokens that a text may hold, whatever its grammar says.
      ends: the tokens that end a text.

    Attributes:
      consumed: tokens of the text so far.
      possible: whether any token may come first.
      first_W: bits of the tokens that may.
    """

    def __init__(self, matcher: Any, ordinary_W: np.ndarray, ends: Sequence[int]) -> None:
        self._start, self._matcher = matcher, matcher.deep_copy()
        self._text: list[int] = []
        self._ends = frozenset(ends)
        self._ordinary_W = ordinary_W
        self.consumed = 0
        self.first_W = np.zeros_like(ordinary_W)
        self.possible = self.fill(self.first_W)

    def fill(self, into_W: np.ndarray) -> bool:
        """Write the bits of the tokens that may come next; False if there are none."""
        self._matcher.unsafe_compute_mask_ptr(into_W.ctypes.data, into_W.nbytes)
        into_W &= self._ordinary_W
        return not self._matcher.is_error() and bool(into_W.any())

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        self.consumed += len(tokens)
        for token in tokens:
            if token in self._ends:
                return
            self._text.append(token)
            self._matcher.consume_token(token)

    def forced(self, most: int) -> list[int]:
        """Tokens that are likely to follow since the grammar leaves no other text; at most `most`."""
        return self._matcher.compute_ff_tokens()[:most]

    def fill_tree(
        self, nodes_M: np.ndarray, children: Sequence[Sequence[int]], into_MW: np.ndarray
    ) -> None:
        """Write the bits of the tokens that may follow each node.

        Nodes that the grammar forbids, and those after them, keep what is there. A node that nothing
        may follow gets a token that is forbidden there, so that it is not accepted: plain decoding
        ends in the step after it.

        Args:
          nodes_M: tokens of the nodes, the root first; the root is consumed already.
          children: of each node.
          into_MW: its first row is filled in already.
        """

        def visit(node: int, path: list[int]) -> None:
            for child in children[node]:
                token = int(nodes_M[child])
                if not into_MW[node, token >> 5] >> np.uint32(token & 31) & 1:
                    continue
                if token in self._ends:
                    into_MW[child] = ALL
                    continue
                if self._matcher.consume_token(token) and self.fill(into_MW[child]):
                    visit(child, [*path, token])
                else:
                    nodes_M[child] = self._forbidden(into_MW[node])
                if self._matcher.is_error():  # for good: nothing can be taken back
                    self._matcher = self._start.deep_copy()
                    self._matcher.consume_tokens([*self._text, *path])
                else:
                    self._matcher.rollback(1)

        visit(0, [])

    @staticmethod
    def _forbidden(allowed_W: np.ndarray) -> int:
        """A token without a bit."""
        word = int(np.argmax(allowed_W != ALL))
        return 32 * word + int(
            np.argmin(
                np.unpackbits(allowed_W[word : word + 1].view(np.uint8), bitorder="little")
            )
        )
