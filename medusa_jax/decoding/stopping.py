"""Ends of rows: after a token that ends the text, such as EOS, or at the token limit.

Both are arrays, so requests that differ in them share one compiled program.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Status of a row: running, ended (and why), or waiting (`rows.run_only`). STUCK: its constraint leaves
# no token. BROKEN: its logits are NaN, or all are minus infinity.
RUNNING, STOPPED, LIMIT, PAUSED, STUCK, BROKEN = 0, 1, 2, 3, 4, 5

# Fills rows with fewer ends: neither a token nor `NO_TOKEN`.
NEVER = -2


def pack_ends(rows: Sequence[Sequence[int]], least: int = 1) -> np.ndarray:
    """The tokens that end each row [B, Q], padded with NEVER to at least this many.

    Example: rows [[2], [2, 5]] become [[2, NEVER], [2, 5]].
    """
    end_BQ = np.full((len(rows), max(least, *map(len, rows))), NEVER, np.int32)
    for row_Q, ends in zip(end_BQ, rows):
        row_Q[: len(ends)] = ends
    return end_BQ


def count_until_end(
    ends_BL: jax.Array, n_B: jax.Array, room_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The number of the n emitted tokens to keep, and the row's new status.

    Tokens after an end inside an accepted path are cut; the end itself is kept.

    Args:
      ends_BL: whether the row ends after each token (entries from n on are ignored).
      room_B: tokens that the row's limit still allows.

    Returns: (count_B, status_B).

    Example: n 4, room 9, ends after the second: (2, STOPPED); room 1: (1, LIMIT).
    """
    L = ends_BL.shape[1]
    index_1L = jnp.arange(L, dtype=jnp.int32)[None]  # with 64-bit types enabled, too
    counts_BL = ends_BL & (index_1L < n_B[:, None])
    end_B = jnp.min(jnp.where(counts_BL, index_1L, L), axis=1)
    count_B = jnp.minimum(jnp.minimum(end_B + 1, n_B), room_B)
    stopped_B = end_B < jnp.minimum(n_B, room_B)
    status_B = jnp.where(stopped_B, STOPPED, jnp.where(room_B <= n_B, LIMIT, RUNNING))
    return count_B, status_B
