"""Parameters stored in the blocks of a GGUF file, read on demand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medusa_jax.sharding import PyTree


@dataclass(frozen=True)
class Blocks:
    """A matrix as it is stored; a row has all weights of one output of a kernel, or of one token's embedding.

    Attributes:
      kind: type of the blocks, such as "Q4_1".
      inputs: weights of a row.
      rows: reads all rows: [rows, bytes], uint8.
      unpacked: reads some rows, given a slice or an array of row numbers, in float32; refuses values that are not finite.
      exact: whether the blocks alone are the values; else they are multiplied by a factor.
    """

    kind: str
    inputs: int
    rows: Callable[[], np.ndarray]
    unpacked: Callable[[Any], np.ndarray]
    exact: bool = True

    def take(self, rows: np.ndarray) -> "Blocks":
        """Some of these rows, in this order."""
        return replace(
            self,
            rows=lambda: self.rows()[rows],
            unpacked=lambda chosen: self.unpacked(rows[chosen]),
        )


def split_blocks(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Split a parameter tree into its `Blocks` and the rest, which keeps empty entries."""
    blocks: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Blocks):
            blocks[name] = value
        elif isinstance(value, dict):
            inner_blocks, others[name] = split_blocks(value)
            blocks |= {name: inner_blocks} if inner_blocks else {}
        else:
            others[name] = value
    return blocks, others
