"""Attention of a text in parts of its keys, merged by a running softmax.

As in FlashAttention (Dao et al. 2022), with the softmax of Milakov and Gimelshein (2018): scores of all queries
and all keys are never in memory at once.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.model.cache import Pair
from medusa_jax.model.grouped import dot, flat, fold_queries
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import PyTree

# Queries of a text per block, and cache slots per block for a piece of a prompt.
BLOCK = 64
SLOTS = 512
# Number of spans of a text; queries are scored against the keys up to their span's end. More spans waste fewer
# scores but compile more code.
SPANS = 4


class PartialAttention(NamedTuple):
    """Attention of queries over some of their keys; all in float32 or wider.

    Attributes:
      out_BGTRH: the mean of the values, weighted by exp(score).
      norm_BGTR1: the logarithm of the sum of exp(score).
    """

    out_BGTRH: jax.Array
    norm_BGTR1: jax.Array


def attend_part(
    q_BGTRH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, visible_BTS: jax.Array
) -> PartialAttention:
    """Attention of T queries over S keys; the R queries of a group share its keys.

    Division by the sum of the weights comes after the product with the values, the smaller array.
    """
    dtype = q_BGTRH.dtype
    score = scores(q_BGTRH, k_BGSH, visible_BTS)
    top = lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    weight = jnp.exp(score - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    out = dot(fold_queries(weight.astype(dtype)), v_BGSH.astype(dtype), 2)
    return PartialAttention(out.reshape(q_BGTRH.shape) / total, top + jnp.log(total))


def scores(q_BGTRH: jax.Array, k_BGSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled products [B, G, T, R, S] in float32 or wider; invisible keys get the type's minimum."""
    B, G, T, R, H = q_BGTRH.shape
    score = dot(fold_queries(q_BGTRH), k_BGSH.astype(q_BGTRH.dtype), 3)
    score = score.reshape(B, G, T, R, -1) * (H**-0.5)
    return jnp.where(visible_BTS[:, None, :, None, :], score, jnp.finfo(score.dtype).min)


def merge_parts(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Attention over the keys of both; every query must see a key of a."""
    norm = jnp.logaddexp(a.norm_BGTR1, b.norm_BGTR1)
    share_a, share_b = jnp.exp(a.norm_BGTR1 - norm), jnp.exp(b.norm_BGTR1 - norm)
    return PartialAttention(a.out_BGTRH * share_a + b.out_BGTRH * share_b, norm)


def rows_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> PartialAttention:
    """Attend like `blocks_part`, one row at a time."""

    @jax.checkpoint
    def row(row_arrays: tuple[PyTree, ...]) -> PartialAttention:
        part = blocks_part(*jax.tree.map(lambda x: x[None], row_arrays))
        return jax.tree.map(lambda x: x[0], part)

    return lax.map(row, (q_BGTRH, k_BGTH, v_BGTH, mask))


def blocks_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> PartialAttention:
    """Attention of a text over itself, by blocks of queries.

    The backward pass recomputes a block's scores, so memory grows linearly with the text.
    """
    T = q_BGTRH.shape[2]
    q_BGTRH, k_BGTH, v_BGTH, mask = whole_blocks(q_BGTRH, k_BGTH, v_BGTH, mask)
    n_blocks = q_BGTRH.shape[2] // BLOCK
    ends = sorted({-(-n_blocks * i // SPANS) for i in range(SPANS + 1)})

    def span(begin: int, end: int) -> PartialAttention:
        first = max(0, begin * BLOCK - mask.window + 1) if mask.window else 0
        keys, values = (x[:, :, first : end * BLOCK] for x in (k_BGTH, v_BGTH))

        @jax.checkpoint
        def one(i: jax.Array) -> PartialAttention:
            visible_BQS = mask.visible(i * BLOCK, BLOCK, first, keys.shape[2])
            return attend_part(block(q_BGTRH, i), keys, values, visible_BQS)

        return lax.map(one, jnp.arange(begin, end))

    parts = [span(*edges) for edges in itertools.pairwise(ends)]
    part = jax.tree.map(lambda *x: join_blocks(jnp.concatenate(x)), *parts)
    return jax.tree.map(lambda x: x[:, :, :T], part)


def attend_cached(
    q_BGTRH: jax.Array,
    new_part: PartialAttention,
    cache: Pair,
    start_B: jax.Array,
    window: int,
) -> jax.Array:
    """Attention of T consecutive tokens over themselves and a cached text before them.

    Reads only slots that some row can see, so the cost depends on the text, not on the cache size.

    Args:
      new_part: attention of the tokens over themselves. It comes first: every token sees itself, so no
        running softmax starts empty.
      cache: keys and values [B, G, S, H] without the new ones; slots [0, start) are visible.
      window: as in `CausalMask`.

    Returns: [B, T, N * H].
    """
    T, S = q_BGTRH.shape[2], cache[0].shape[2]
    size = min(SLOTS, S)

    def with_block(i: jax.Array, part: PartialAttention) -> PartialAttention:
        first = jnp.minimum(i * size, S - size)  # the last block may overlap the one before
        k_BGSH, v_BGSH = (lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in cache)
        slot_S = first + jnp.arange(size)
        distance_BS = start_B[:, None] - slot_S[None, :]
        in_block_BS = (distance_BS > 0) & (slot_S >= i * size)[None, :]
        distance_BTS = distance_BS[:, None, :] + jnp.arange(T)[None, :, None]
        visible_BTS = in_block_BS[:, None, :] & (distance_BTS < (window or S + T))
        return merge_parts(part, attend_part(q_BGTRH, k_BGSH, v_BGSH, visible_BTS))

    oldest = jnp.maximum(jnp.min(start_B) - window + 1, 0) if window else 0
    blocks = oldest // size, -(-jnp.max(start_B) // size)
    part = lax.fori_loop(*blocks, with_block, new_part)
    return flat(part.out_BGTRH.astype(q_BGTRH.dtype))


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


def join_blocks(blocks: jax.Array) -> jax.Array:
    """Blocks [n, B, G, Q, ...] -> [B, G, n * Q, ...]."""
    _, B, G, _, *sizes = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(B, G, -1, *sizes)
