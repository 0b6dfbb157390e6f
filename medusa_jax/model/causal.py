"""Causal attention within a text and after a cached one; memory is linear in its length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.devices.platforms import platform
from medusa_jax.model.online_softmax import (
    Causal,
    Part,
    attend_part,
    dot,
    finished,
    flat,
    folded,
    grouped,
    merged,
    scores,
)
from medusa_jax.sharding import PyTree

# Queries and keys of a text that are scored at a time; these fit into a CPU's cache.
BLOCK = 128
# Cache slots that are scored at a time.
SLOTS = 512


def attend_causal(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> jax.Array:
    """Attention within whole rows: [B, T, N * H]."""
    q_BGTRH = grouped(q_BTNH, k_BGTH.shape[1])
    if q_BTNH.shape[1] <= 2 * BLOCK:
        return flat(finished(short_part(q_BGTRH, k_BGTH, v_BGTH, sees), q_BTNH.dtype))
    return flat(attend_long(q_BGTRH, k_BGTH, v_BGTH, sees))


def attend_behind(
    q_BTNH: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    start_B: jax.Array,
    window: int,
) -> jax.Array:
    """Attention of T consecutive tokens over themselves and a cached text before them.

    Reads only slots that some row can see, so the cost depends on the text, not on the cache size.

    Args:
      new: keys and values of the tokens, each [B, G, T, H], for the slots from `start_B` on.
      cache: keys and values [B, G, S, H] without the new ones; slots [0, start) are visible.
      window: as in `Causal`.

    Returns: [B, T, N * H].
    """
    T, S = q_BTNH.shape[1], cache[0].shape[2]
    size = min(SLOTS, S)
    q_BGTRH = grouped(q_BTNH, cache[0].shape[1])

    def with_block(i: jax.Array, part: Part) -> Part:
        first = jnp.minimum(i * size, S - size)  # the last block may overlap the one before
        k_BGSH, v_BGSH = (lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in cache)
        slot_S = first + jnp.arange(size)
        distance_BS = start_B[:, None] - slot_S[None, :]
        seen_BS = (distance_BS > 0) & (slot_S >= i * size)[None, :]
        near_BTS = distance_BS[:, None, :] + jnp.arange(T)[None, :, None] < (
            window or S + T
        )
        seen_BTS = seen_BS[:, None, :] & near_BTS
        return merged(part, attend_part(q_BGTRH, k_BGSH, v_BGSH, seen_BTS))

    # The new keys come first: every token sees itself, so each starts with a score.
    part_of_new = short_part if T <= 2 * BLOCK else long_part
    if (
        platform() != "cpu"
    ):  # blocks are for a CPU's caches; elsewhere their loop costs more
        part_of_new = whole_part
    part = part_of_new(q_BGTRH, *new, Causal(window=window))
    oldest = jnp.maximum(jnp.min(start_B) - window + 1, 0) if window else 0
    blocks = oldest // size, -(-jnp.max(start_B) // size)
    return flat(finished(lax.fori_loop(*blocks, with_block, part), q_BTNH.dtype))


def whole_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> Part:
    """All queries over all keys at once."""
    T = q_BGTRH.shape[2]
    return attend_part(q_BGTRH, k_BGTH, v_BGTH, sees.visible(0, T, 0, T))


def short_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> Part:
    """Attention of spans of queries over the keys up to their end, which halves the work."""
    T, span = q_BGTRH.shape[2], BLOCK // 2
    parts = []
    for begin in range(0, T, span):
        end = min(begin + span, T)
        visible_BQS = sees.visible(begin, end - begin, 0, end)
        q_BGQRH = q_BGTRH[:, :, begin:end]
        parts.append(
            attend_part(q_BGQRH, k_BGTH[:, :, :end], v_BGTH[:, :, :end], visible_BQS)
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)


def long_part(
    q_BGTRH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    sees: Causal,
    finish_block: Callable[[Part], PyTree] = lambda part: part,
) -> PyTree:
    """Blocks of queries over blocks of keys, one pair at a time (Dao et al. 2022, algorithm 1).

    Returns: the results of `finish_block` for all blocks of queries, concatenated.
    """
    T = q_BGTRH.shape[2]
    q_BGTRH, k_BGTH, v_BGTH, sees = whole_blocks(q_BGTRH, k_BGTH, v_BGTH, sees)

    def row(i: jax.Array) -> PyTree:
        q_BGQRH = block(q_BGTRH, i)

        def pair(j: jax.Array) -> Part:
            visible_BQS = sees.visible(i * BLOCK, BLOCK, j * BLOCK, BLOCK)
            return attend_part(q_BGQRH, block(k_BGTH, j), block(v_BGTH, j), visible_BQS)

        # The diagonal block first, so that every query starts with a score.
        first = oldest_block(i, sees)
        part = lax.fori_loop(first, i, lambda j, part: merged(part, pair(j)), pair(i))
        return finish_block(part)

    parts = lax.map(row, jnp.arange(q_BGTRH.shape[2] // BLOCK))
    return jax.tree.map(lambda x: joined(x)[:, :, :T], parts)


@jax.custom_vjp
def attend_long(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> jax.Array:
    """The output of `long_part`, with a gradient: [B, G, T, R, H].

    The backward pass recomputes the scores of every pair, so only the output and one number per query are
    kept for it (Dao et al. 2022, algorithm 4).
    """
    return attend_long_forward(q_BGTRH, k_BGTH, v_BGTH, sees)[0]


def attend_long_forward(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, sees: Causal
) -> tuple[jax.Array, PyTree]:
    """The output, and the residuals for the backward pass."""

    def finish_block(part: Part) -> tuple[jax.Array, jax.Array]:
        norm_BGQR1 = part.top_BGTR1 + jnp.log(part.total_BGTR1)
        return finished(part, q_BGTRH.dtype), norm_BGQR1

    out_BGTRH, norm_BGTR1 = long_part(q_BGTRH, k_BGTH, v_BGTH, sees, finish_block)
    return out_BGTRH, (q_BGTRH, k_BGTH, v_BGTH, sees, out_BGTRH, norm_BGTR1)


def attend_long_backward(residuals: PyTree, d_out_BGTRH: jax.Array) -> tuple[PyTree, ...]:
    """Cotangents of queries, keys and values; `sees` has none."""
    q_BGTRH, k_BGTH, v_BGTH, sees, out_BGTRH, norm_BGTR1 = residuals
    T, scale = q_BGTRH.shape[2], q_BGTRH.shape[-1] ** -0.5
    dtype, wide = q_BGTRH.dtype, norm_BGTR1.dtype
    d_sees = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), sees)
    # The mean of d_weight under the weights, computed without the weights (Dao et al. 2022, equation 4).
    mean_BGTR1 = jnp.sum(d_out_BGTRH.astype(wide) * out_BGTRH, axis=-1, keepdims=True)
    q_BGTRH, k_BGTH, v_BGTH, sees, d_out_BGTRH, norm_BGTR1, mean_BGTR1 = whole_blocks(
        q_BGTRH, k_BGTH, v_BGTH, sees, d_out_BGTRH, norm_BGTR1, mean_BGTR1
    )

    def row(d_kv: PyTree, i: jax.Array) -> tuple[PyTree, jax.Array]:
        q, d_out, norm, mean = (
            block(x, i) for x in (q_BGTRH, d_out_BGTRH, norm_BGTR1, mean_BGTR1)
        )

        def pair(j: jax.Array, carry: PyTree) -> PyTree:
            d_q, d_k_BGTH, d_v_BGTH = carry
            k, v = block(k_BGTH, j), block(v_BGTH, j)
            visible_BQS = sees.visible(i * BLOCK, BLOCK, j * BLOCK, BLOCK)
            weight = jnp.exp(scores(q, k, visible_BQS) - norm)
            d_weight = dot(folded(d_out), v, 3, 3).reshape(weight.shape)
            d_score = folded((weight * (d_weight - mean) * scale).astype(dtype))
            d_k = dot(d_score, folded(q), 2, 2)
            d_v = dot(folded(weight.astype(dtype)), folded(d_out), 2, 2)
            d_q += dot(d_score, k, 3, 2).reshape(q.shape)
            return d_q, added(d_k_BGTH, j, d_k), added(d_v_BGTH, j, d_v)

        zero = jnp.zeros(q.shape, wide)
        d_q, *d_kv = lax.fori_loop(oldest_block(i, sees), i + 1, pair, (zero, *d_kv))
        return tuple(d_kv), d_q.astype(dtype)

    zeros = jnp.zeros(k_BGTH.shape, wide)
    n = k_BGTH.shape[2] // BLOCK
    (d_k, d_v), d_q = lax.scan(row, (zeros, zeros), jnp.arange(n))
    d_q, d_k, d_v = (x[:, :, :T].astype(dtype) for x in (joined(d_q), d_k, d_v))
    return d_q, d_k, d_v, d_sees


attend_long.defvjp(attend_long_forward, attend_long_backward)


def oldest_block(i: jax.Array, sees: Causal) -> jax.Array | int:
    """The first block of keys that a query of block i can see."""
    return jnp.maximum(i * BLOCK - sees.window + 1, 0) // BLOCK if sees.window else 0


def whole_blocks(*trees: PyTree) -> tuple[PyTree, ...]:
    """Pad the T axis (the third; the second of segment ids) to a multiple of BLOCK."""

    def pad(x: jax.Array) -> jax.Array:
        axis = min(2, x.ndim - 1)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, -x.shape[axis] % BLOCK)
        return jnp.pad(x, widths)

    return jax.tree.map(pad, trees)


def block(x: jax.Array, i: jax.Array) -> jax.Array:
    """Block i of the T axis of x [B, G, T, ...]."""
    return lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=2)


def added(x: jax.Array, i: jax.Array, more: jax.Array) -> jax.Array:
    """x with `more` added to its block i."""
    return lax.dynamic_update_slice_in_dim(x, block(x, i) + more, i * BLOCK, axis=2)


def joined(blocks: jax.Array) -> jax.Array:
    """Blocks [n, B, G, Q, ...] -> [B, G, n * Q, ...]."""
    _, B, G, _, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(B, G, -1, *rest)
