"""Ends of rows: after a stop sequence (an EOS is one of length 1), or at the token limit.

Stop sequences and limits are arrays, so requests that differ in them share one compiled
program.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Status of a row: running, ended (and why), or waiting (`rows.run_only`). STUCK: its constraint leaves
# no token. BROKEN: its logits are NaN, or all are minus infinity.
RUNNING, STOPPED, LIMIT, PAUSED, STUCK, BROKEN = 0, 1, 2, 3, 4, 5

# Special values in place of a token: matches any token; matches none; no token (before the first one).
ANY, NEVER, NOTHING = -1, -2, -3


def pack_stops(
    rows: Sequence[Sequence[Sequence[int]]], min_shape: tuple[int, int] = (1, 1)
) -> np.ndarray:
    """Pack the stop sequences of every row into one array [B, Q, W]: Q sequences of W tokens.

    Shorter sequences start with ANY; rows with fewer sequences are padded with NEVER.

    Args:
      min_shape: least Q and W of the array.

    Example: rows [(2,)] and [(2,), (5, 7)] become
    [[[ANY, 2], [NEVER, NEVER]], [[ANY, 2], [5, 7]]].
    """
    Q = max(min_shape[0], *map(len, rows))
    W = max([min_shape[1], *(len(sequence) for row in rows for sequence in row)])
    stop_BQW = np.full((len(rows), Q, W), NEVER, np.int32)
    for b, row in enumerate(rows):
        for q, sequence in enumerate(row):
            stop_BQW[b, q, : W - len(sequence)] = ANY
            stop_BQW[b, q, W - len(sequence) :] = sequence
    return stop_BQW


def completes_stop(
    stop_BQW: jax.Array, tokens_BO: jax.Array, emitted_BL: jax.Array, n_new_B: jax.Array
) -> jax.Array:
    """Whether each emitted token completes a stop sequence: bool [B, L].

    Args:
      tokens_BO: all new tokens, including `emitted_BL` from index `n_new_B` on.

    Example: new tokens [4, 5] before this step, emitted [7, 2], stops (5, 7) and (2,): both do.
    """
    W = stop_BQW.shape[2]
    complete_BLQ = jnp.ones((*emitted_BL.shape, stop_BQW.shape[1]), bool)
    for back in range(W):
        token_BL = emitted_BL
        if back:
            at_BL = n_new_B[:, None] + jnp.arange(emitted_BL.shape[1])[None, :] - back
            token_BL = jnp.take_along_axis(tokens_BO, jnp.maximum(at_BL, 0), axis=1)
            token_BL = jnp.where(at_BL >= 0, token_BL, NOTHING)
        stop_B1Q = stop_BQW[:, None, :, W - 1 - back]
        complete_BLQ &= (token_BL[:, :, None] == stop_B1Q) | (stop_B1Q == ANY)
    return jnp.any(complete_BLQ, axis=-1)


def count_until_end(
    stops_BL: jax.Array, n_B: jax.Array, room_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The number of the n emitted tokens to keep, and the row's new status.

    Tokens after a stop inside an accepted path are cut; the stop sequence itself is kept.

    Args:
      stops_BL: whether the row stops after each token (entries from n on are ignored).
      room_B: tokens that the row's limit still allows.

    Returns: (count_B, status_B).

    Example: n 4, room 9, stops after the second: (2, STOPPED); room 1: (1, LIMIT).
    """
    L = stops_BL.shape[1]
    index_1L = jnp.arange(L, dtype=jnp.int32)[None]  # with 64-bit types enabled, too
    counts_BL = stops_BL & (index_1L < n_B[:, None])
    end_B = jnp.min(jnp.where(counts_BL, index_1L, L), axis=1)
    count_B = jnp.minimum(jnp.minimum(end_B + 1, n_B), room_B)
    stopped_B = end_B < jnp.minimum(n_B, room_B)
    status_B = jnp.where(stopped_B, STOPPED, jnp.where(room_B <= n_B, LIMIT, RUNNING))
    return count_B, status_B
