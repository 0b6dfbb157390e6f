"""Move the columns that count to the front of every row, so that the loss skips the rest."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Rows(NamedTuple):
    """Inputs of the loss; column t of every array belongs to label t.

    Attributes:
      features_K: [B, T, D] of each head.
      labels_BT: tokens to predict.
      mask_K: [B, T] of each head, True where its prediction counts.
      teacher_BTD: features for `Teacher.logits_fn`, or None.
    """

    features_K: tuple[jax.Array, ...]
    labels_BT: jax.Array
    mask_K: tuple[jax.Array, ...]
    teacher_BTD: jax.Array | None

    def chunk(self, i: jax.Array, size: int) -> "Rows":
        """Columns [i size, (i + 1) size)."""
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, i * size, size, axis=1), self
        )


class Packed(NamedTuple):
    """Rows with the columns that count moved to the front.

    Example: chunks of 2 columns; "x" counts; each label is its column's number:

        counts    . . x x x .      labels    2 3 4 0 1 5      n_chunks  2 (the longest row has 3)
                  x . . . x x                0 4 5 1 2 3

    Attributes:
      rows: padded with zeros to a multiple of the chunk.
      back_BT: the new column of input column t.
      n_chunks: number of chunks with a column that counts in some row.
    """

    rows: Rows
    back_BT: jax.Array
    n_chunks: jax.Array


def pack(rows: Rows, chunk: int) -> Packed:
    """Columns that count for any head first, in order; see `Packed`."""
    counts_BT = jnp.any(jnp.stack(rows.mask_K), axis=0)
    order_BT = jnp.argsort(~counts_BT, axis=1, stable=True)
    pad = -counts_BT.shape[1] % chunk

    def packed(x: jax.Array) -> jax.Array:
        x = columns(x, order_BT)
        return jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))

    longest = jnp.max(jnp.sum(counts_BT, axis=1))
    n_chunks = (longest + chunk - 1) // chunk
    return Packed(jax.tree.map(packed, rows), jnp.argsort(order_BT, axis=1), n_chunks)


def columns(x: jax.Array, index_BT: jax.Array) -> jax.Array:
    """x[b, index[b, t], ...] for x of [B, T, ...]."""
    index = index_BT.reshape(index_BT.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)
