"""The rows and columns that a loss computes on: split over devices, counted ones first."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from medusa_jax.sharding import ROWS, PyTree, row_shards


class LossColumns(NamedTuple):
    """Inputs of the loss; column t of every array belongs to label t.

    Attributes:
      features_K: [B, T, D] of each head.
      labels_BT: tokens to predict.
      mask_K: [B, T] of each head, True where its prediction counts.
      teacher_BTD: features that the teacher's LM head reads, or None.
    """

    features_K: tuple[jax.Array, ...]
    labels_BT: jax.Array
    mask_K: tuple[jax.Array, ...]
    teacher_BTD: jax.Array | None

    def chunk(self, i: jax.Array, size: int) -> "LossColumns":
        """Columns [i size, (i + 1) size)."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, i * size, size, axis=1), self
        )


class Packed(NamedTuple):
    """Columns of a loss, those that count moved to the front.

    Example: chunks of 2 columns; "x" counts; each label is its column's number:

        counts    . . x x x .      labels    2 3 4 0 1 5      n_chunks  2 (the longest row has 3)
                  x . . . x x                0 4 5 1 2 3

    Attributes:
      columns: padded with zeros to a multiple of the chunk.
      back_BT: the new column of input column t.
      n_chunks: number of chunks with a column that counts in some row.
    """

    columns: LossColumns
    back_BT: jax.Array
    n_chunks: jax.Array


def pack(columns: LossColumns, chunk: int) -> Packed:
    """Columns that count for any head first, in order; see `Packed`."""
    counts_BT = jnp.any(jnp.stack(columns.mask_K), axis=0)
    order_BT = jnp.argsort(~counts_BT, axis=1, stable=True)
    pad = -counts_BT.shape[1] % chunk

    def packed(x: jax.Array) -> jax.Array:
        x = take_columns(x, order_BT)
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))

    longest = jnp.max(jnp.sum(counts_BT, axis=1))
    n_chunks = (longest + chunk - 1) // chunk
    return Packed(jax.tree.map(packed, columns), jnp.argsort(order_BT, axis=1), n_chunks)


def take_columns(x: jax.Array, index_BT: jax.Array) -> jax.Array:
    """x[b, index[b, t], ...] for x of [B, T, ...]."""
    index = index_BT.reshape(index_BT.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


class RowSplit(NamedTuple):
    """How rows are split over the axes `ROWS` of a mesh, and where kernels are placed during the loop.

    XLA sums a gradient that a loop accumulates over all devices in every iteration: for LM heads, in every
    chunk of the loss. Rows are therefore [P, B / P, ...] with one shard per device, accumulators also have
    the axis P, and it is summed once after the loop. Kernels are gathered once, before the loop.
    The tensor axis is left to XLA.

    On one device, or if the devices do not divide the rows, arrays have no axis P.

    Attributes:
      mesh: None for a single shard.
    """

    mesh: Mesh | None

    @classmethod
    def of(cls, mesh: Mesh | None, n_rows: int) -> "RowSplit":
        """The split of `n_rows` rows."""
        if mesh is None or row_shards(mesh) == 1 or n_rows % row_shards(mesh):
            return cls(None)
        return cls(mesh)

    def gather(self, x: jax.Array, spec: Spec, accumulator: bool = False) -> jax.Array:
        """A parameter replicated on every device, except over the tensor axis.

        Args:
          spec: its mesh axes, from the table in `sharding.py`.
          accumulator: x is `zeros` of the parameter.
        """
        if self.mesh is None:
            return x
        rows = [ROWS] if accumulator else []
        axes: list[str | None] = []
        for dim, axis in zip(x.shape[len(rows) :], spec):
            divides = axis == "tensor" and dim % self.mesh.shape["tensor"] == 0
            axes.append("tensor" if divides else None)
        sharding = NamedSharding(self.mesh, Spec(*rows, *axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def zeros(self, tree: PyTree) -> PyTree:
        """An accumulator per shard for every leaf: [P, ...]."""
        n = () if self.mesh is None else (row_shards(self.mesh),)
        return jax.tree.map(lambda x: jnp.zeros((*n, *x.shape), x.dtype), tree)

    def split(self, tree: PyTree) -> PyTree:
        """Rows [B, ...] -> [P, B / P, ...]."""
        if self.mesh is None:
            return tree
        n = row_shards(self.mesh)
        return jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), tree)

    def join(self, tree: PyTree) -> PyTree:
        """The inverse of `split`."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

    def each(self, fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Map fn(shared, *arguments of a shard) over the shards."""

        def over_shards(common: PyTree, *rows: PyTree) -> PyTree:
            return jax.vmap(fn, in_axes=(None, *[0] * len(rows)))(common, *rows)

        return fn if self.mesh is None else over_shards

    def total(self, tree: PyTree) -> PyTree:
        """The sums over shards: [P, ...] -> [...]."""
        if self.mesh is None:
            return tree
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)
