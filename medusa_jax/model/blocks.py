"""Parameters stored in the blocks of a GGUF file, read on demand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from medusa_jax.sharding import PyTree


@dataclass(frozen=True)
class Blocks:
    """Rows of a tensor as they are stored.

    Attributes:
      kind: type of the blocks, such as "Q4_1".
      rows: reads all rows: [rows, bytes], uint8.
      unpacked: reads some rows, given a slice or an array of row numbers, in float32.
      damaged: the error to raise if a scale is not finite.
      exact: whether the blocks alone are the values; else they are multiplied by a factor.
    """

    kind: str
    rows: Callable[[], np.ndarray]
    unpacked: Callable[[Any], np.ndarray]
    damaged: Exception
    exact: bool = True

    def take(self, rows: np.ndarray) -> "Blocks":
        """Some of these rows, in this order."""
        return replace(
            self,
            rows=lambda: self.rows()[rows],
            unpacked=lambda chosen: self.unpacked(rows[chosen]),
        )


@dataclass(frozen=True)
class BlockRows:
    """A kernel or an embedding in blocks; a row contains all weights of one output (one token).

    Attributes:
      shape: the parameter's: kernels [inputs, outputs], embeddings [tokens, width].
      by_column: whether outputs are the parameter's columns, as a kernel's are.
      blocks: its rows in the file.
    """

    shape: tuple[int, ...]
    by_column: bool
    blocks: Blocks

    @property
    def outputs(self) -> int:
        return self.shape[1] if self.by_column else self.shape[0]

    @property
    def inputs(self) -> int:
        return self.shape[0] if self.by_column else self.shape[1]

    def __getitem__(self, places: tuple[np.ndarray, ...]) -> np.ndarray:
        """Single weights, by the parameter's indices."""
        inputs, outputs = places if self.by_column else places[::-1]
        rows, place = np.unique(outputs, return_inverse=True)
        return self.blocks.unpacked(rows)[place, inputs]


def split_blocks(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Split a parameter tree into its `BlockRows` and the rest, which keeps empty entries."""
    blocks: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, BlockRows):
            blocks[name] = value
        elif isinstance(value, dict):
            inner_blocks, others[name] = split_blocks(value)
            blocks |= {name: inner_blocks} if inner_blocks else {}
        else:
            others[name] = value
    return blocks, others
