"""CausalMask attention within a text and after a cached one; memory is linear in its length.

Attention over many keys is merged from attention over blocks of them, with the running softmax of Milakov and
Gimelshein (2018), as in FlashAttention (Dao et al. 2022): a part keeps the largest score, the sum of the
exponentials and the output before division by that sum, and two parts merge into one. So no array has both all
queries and all keys.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.devices.platforms import platform
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import PyTree

# Queries and keys of a text that are scored at a time; these fit into a CPU's cache.
BLOCK = 128
# Cache slots that are scored at a time.
SLOTS = 512
# Longest text for which a CPU scores spans of a row's queries over all keys before them: 2.4 times as fast
# as pairs of blocks at 512 tokens (8 rows, 9 heads of 64). Half of the scores of one row exist at a time.
SPANS_UP_TO = 512

# Keys and values [B, G, T, H].
KeysValues = tuple[jax.Array, jax.Array]


class CausalMask(struct.PyTreeNode):
    """Causal visibility: a token sees itself and earlier tokens of its row.

    Attributes:
      segment_ids_BT: segments of packed rows; only tokens of the same segment are visible. None: all.
      window: only the last `window` tokens are visible, itself included; 0: all.
    """

    segment_ids_BT: jax.Array | None = None
    window: int = struct.field(pytree_node=False, default=0)

    def visible(
        self, begin: jax.Array | int, T: int, first: jax.Array | int, S: int
    ) -> jax.Array:
        """Which of the tokens from `first` on each token from `begin` on sees: [B or 1, T, S]."""
        distance_TS = (begin + jnp.arange(T))[:, None] - (first + jnp.arange(S))[None, :]
        visible_TS = distance_TS >= 0
        if self.window:
            visible_TS &= distance_TS < self.window
        if self.segment_ids_BT is None:
            return visible_TS[None]
        query_BT, key_BS = (
            lax.dynamic_slice_in_dim(self.segment_ids_BT, at, size, axis=1)
            for at, size in ((begin, T), (first, S))
        )
        return visible_TS[None] & (query_BT[:, :, None] == key_BS[:, None, :])


class Part(NamedTuple):
    """Attention of queries over some of their keys; all in float32 or wider.

    Attributes:
      out_BGTRH: the values weighted by exp(score - top), not yet divided by `total`.
      top_BGTR1: the largest score.
      total_BGTR1: the sum of exp(score - top).
    """

    out_BGTRH: jax.Array
    top_BGTR1: jax.Array
    total_BGTR1: jax.Array


def scores(q_BGTRH: jax.Array, k_BGSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled products [B, G, T, R, S] in float32 or wider; invisible keys get the type's minimum."""
    B, G, T, R, H = q_BGTRH.shape
    q_BGQH = q_BGTRH.reshape(B, G, T * R, H)
    score = dot(q_BGQH, k_BGSH.astype(q_BGQH.dtype), 3, 3).reshape(B, G, T, R, -1)
    score = score * (H**-0.5)
    return jnp.where(visible_BTS[:, None, :, None, :], score, jnp.finfo(score.dtype).min)


def attend_part(
    q_BGTRH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, visible_BTS: jax.Array
) -> Part:
    """Attention of T queries over S keys; the R queries of a group share its keys.

    Division by the sum of the weights comes after the product with the values, the smaller array.
    """
    dtype = q_BGTRH.dtype
    score = scores(q_BGTRH, k_BGSH, visible_BTS)
    top = lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
    weight = jnp.exp(score - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    out = dot(folded(weight.astype(dtype)), v_BGSH.astype(dtype), 3, 2)
    return Part(out.reshape(q_BGTRH.shape), top, total)


def merged(a: Part, b: Part) -> Part:
    """Attention over the keys of both; every query must see a key of a."""
    top = jnp.maximum(a.top_BGTR1, b.top_BGTR1)
    scale_a, scale_b = jnp.exp(a.top_BGTR1 - top), jnp.exp(b.top_BGTR1 - top)
    out_BGTRH = a.out_BGTRH * scale_a + b.out_BGTRH * scale_b
    return Part(out_BGTRH, top, a.total_BGTR1 * scale_a + b.total_BGTR1 * scale_b)


def finished(part: Part, dtype: DTypeLike) -> jax.Array:
    """The output [B, G, T, R, H] of attention over all keys."""
    return (part.out_BGTRH / part.total_BGTR1).astype(dtype)


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """Product over an axis of each, batched over [B, G], in float32 or wider."""
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(a.dtype),
    )


def products(q_BGQH: jax.Array, k_BGSH: jax.Array) -> jax.Array:
    """Products of queries with the keys of a cache, in the order of the platform: [B, G, Q, S].

    A CPU takes keys times queries, since otherwise it transposes all keys first. A GPU takes queries times
    keys: a softmax across rows of memory is three more kernels in each layer.
    """
    if platform() == "cpu":
        return jnp.swapaxes(dot(k_BGSH, q_BGQH, 3, 3), 2, 3)
    return dot(q_BGQH, k_BGSH, 3, 3)


def folded(x_BGTRX: jax.Array) -> jax.Array:
    """The queries of a group as rows: [B, G, T * R, X]."""
    return x_BGTRX.reshape(*x_BGTRX.shape[:2], -1, x_BGTRX.shape[-1])


def grouped(q_BTNH: jax.Array, G: int) -> jax.Array:
    """Group queries by their key/value head: [B, G, T, R, H]."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 1, 3, 4)


def flat(out_BGTRH: jax.Array) -> jax.Array:
    """[B, G, T, R, H] -> [B, T, N * H]."""
    B, _, T = out_BGTRH.shape[:3]
    return out_BGTRH.transpose(0, 2, 1, 3, 4).reshape(B, T, -1)


def attend_causal(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> jax.Array:
    """Attention within whole rows: [B, T, N * H]."""
    q_BGTRH = grouped(q_BTNH, k_BGTH.shape[1])
    if q_BTNH.shape[1] <= 2 * BLOCK:
        return flat(finished(short_part(q_BGTRH, k_BGTH, v_BGTH, mask), q_BTNH.dtype))
    return flat(attend_long(q_BGTRH, k_BGTH, v_BGTH, mask)[0])


def attend_levels(
    q_BTNH: jax.Array, text: KeysValues, levels: Sequence[KeysValues], mask: CausalMask
) -> jax.Array:
    """Attention of row t over the rows of the text up to t and over row t of each level: [B, T, N * H].

    Args:
      text: keys and values [B, G, T, H], as for `attend_causal`.
      levels: such keys and values for each level.
    """
    q_BGTRH = grouped(q_BTNH, text[0].shape[1])
    dtype, scale = q_BGTRH.dtype, q_BGTRH.shape[-1] ** -0.5
    out_BGTRH, norm_BGTR1 = attend_long(q_BGTRH, *text, mask)
    wide = norm_BGTR1.dtype
    # Each query has one key per level: sums, not matrix products.
    keys, values = ([x[:, :, :, None].astype(wide) for x in y] for y in zip(*levels))
    scores_J = [jnp.sum(q_BGTRH.astype(wide) * k, -1, keepdims=True) * scale for k in keys]
    # The text's share of the softmax: its exponentials add up to exp(norm).
    weight_BGTRJ = jax.nn.softmax(jnp.concatenate([norm_BGTR1, *scores_J], -1), axis=-1)
    weights = jnp.split(weight_BGTRJ, 1 + len(levels), axis=-1)
    parts = [w * x for w, x in zip(weights, [out_BGTRH, *values], strict=True)]
    return flat(sum(parts).astype(dtype))


def attend_cached(
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
      window: as in `CausalMask`.

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
    mask = CausalMask(window=window)
    if (
        platform() != "cpu"
    ):  # blocks are for a CPU's caches; elsewhere their loop costs more
        part = attend_part(q_BGTRH, *new, mask.visible(0, T, 0, T))
    else:
        part = (short_part if T <= 2 * BLOCK else long_part)(q_BGTRH, *new, mask)
    oldest = jnp.maximum(jnp.min(start_B) - window + 1, 0) if window else 0
    blocks = oldest // size, -(-jnp.max(start_B) // size)
    return flat(finished(lax.fori_loop(*blocks, with_block, part), q_BTNH.dtype))


def short_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> Part:
    """Attention of spans of queries over the keys up to their end, which halves the work."""
    T, span = q_BGTRH.shape[2], BLOCK // 2
    parts = []
    for begin in range(0, T, span):
        end = min(begin + span, T)
        visible_BQS = mask.visible(begin, end - begin, 0, end)
        q_BGQRH = q_BGTRH[:, :, begin:end]
        parts.append(
            attend_part(q_BGQRH, k_BGTH[:, :, :end], v_BGTH[:, :, :end], visible_BQS)
        )
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *parts)


def long_part(
    q_BGTRH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    mask: CausalMask,
    finish_block: Callable[[Part], PyTree] = lambda part: part,
) -> PyTree:
    """Blocks of queries over blocks of keys, one pair at a time (Dao et al. 2022, algorithm 1).

    Returns: the results of `finish_block` for all blocks of queries, concatenated.
    """
    T = q_BGTRH.shape[2]
    q_BGTRH, k_BGTH, v_BGTH, mask = whole_blocks(q_BGTRH, k_BGTH, v_BGTH, mask)

    def row(i: jax.Array) -> PyTree:
        q_BGQRH = block(q_BGTRH, i)

        def pair(j: jax.Array) -> Part:
            visible_BQS = mask.visible(i * BLOCK, BLOCK, j * BLOCK, BLOCK)
            return attend_part(q_BGQRH, block(k_BGTH, j), block(v_BGTH, j), visible_BQS)

        # The diagonal block first, so that every query starts with a score.
        first = oldest_block(i, mask)
        part = lax.fori_loop(first, i, lambda j, part: merged(part, pair(j)), pair(i))
        return finish_block(part)

    parts = lax.map(row, jnp.arange(q_BGTRH.shape[2] // BLOCK))
    return jax.tree.map(lambda x: joined(x)[:, :, :T], parts)


@jax.custom_vjp
def attend_long(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> tuple[jax.Array, jax.Array]:
    """Attention by `long_part`, with a gradient: the output [B, G, T, R, H] and its norm [B, G, T, R, 1].

    The norm is the logarithm of the sum of the exponentials of all scores.

    The backward pass recomputes the scores of every pair, so only the output and one number per query are
    kept for it (Dao et al. 2022, algorithm 4).
    """
    return attend_long_forward(q_BGTRH, k_BGTH, v_BGTH, mask)[0]


def attend_long_forward(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> tuple[tuple[jax.Array, jax.Array], PyTree]:
    """The output with its norm, and the residuals for the backward pass."""

    def finish_block(part: Part) -> tuple[jax.Array, jax.Array]:
        norm_BGQR1 = part.top_BGTR1 + jnp.log(part.total_BGTR1)
        return finished(part, q_BGTRH.dtype), norm_BGQR1

    if platform() == "cpu" and q_BGTRH.shape[2] <= SPANS_UP_TO:

        def row(given: tuple[PyTree, ...]) -> PyTree:
            part = short_part(*jax.tree.map(lambda x: x[None], given))
            return jax.tree.map(lambda x: x[0], finish_block(part))

        out_BGTRH, norm_BGTR1 = lax.map(row, (q_BGTRH, k_BGTH, v_BGTH, mask))
    else:
        out_BGTRH, norm_BGTR1 = long_part(q_BGTRH, k_BGTH, v_BGTH, mask, finish_block)
    result = out_BGTRH, norm_BGTR1
    return result, (q_BGTRH, k_BGTH, v_BGTH, mask, *result)


def attend_long_backward(
    residuals: PyTree, d_result: tuple[jax.Array, jax.Array]
) -> tuple[PyTree, ...]:
    """Cotangents of queries, keys and values; the mask has none."""
    q_BGTRH, k_BGTH, v_BGTH, mask, out_BGTRH, norm_BGTR1 = residuals
    d_out_BGTRH, d_norm_BGTR1 = d_result
    T, scale = q_BGTRH.shape[2], q_BGTRH.shape[-1] ** -0.5
    dtype, wide = q_BGTRH.dtype, norm_BGTR1.dtype
    d_mask = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), mask)
    # The mean of d_weight under the weights, computed without the weights (Dao et al. 2022, equation 4).
    mean_BGTR1 = jnp.sum(d_out_BGTRH.astype(wide) * out_BGTRH, axis=-1, keepdims=True)
    mean_BGTR1 -= d_norm_BGTR1  # the norm's derivative by a score is the score's weight
    q_BGTRH, k_BGTH, v_BGTH, mask, d_out_BGTRH, norm_BGTR1, mean_BGTR1 = whole_blocks(
        q_BGTRH, k_BGTH, v_BGTH, mask, d_out_BGTRH, norm_BGTR1, mean_BGTR1
    )

    def row(d_kv: PyTree, i: jax.Array) -> tuple[PyTree, jax.Array]:
        q, d_out, norm, mean = (
            block(x, i) for x in (q_BGTRH, d_out_BGTRH, norm_BGTR1, mean_BGTR1)
        )

        def pair(j: jax.Array, carry: PyTree) -> PyTree:
            d_q, d_k_BGTH, d_v_BGTH = carry
            k, v = block(k_BGTH, j), block(v_BGTH, j)
            visible_BQS = mask.visible(i * BLOCK, BLOCK, j * BLOCK, BLOCK)
            weight = jnp.exp(scores(q, k, visible_BQS) - norm)
            d_weight = dot(folded(d_out), v, 3, 3).reshape(weight.shape)
            d_score = folded((weight * (d_weight - mean) * scale).astype(dtype))
            d_k = dot(d_score, folded(q), 2, 2)
            d_v = dot(folded(weight.astype(dtype)), folded(d_out), 2, 2)
            d_q += dot(d_score, k, 3, 2).reshape(q.shape)
            return d_q, added(d_k_BGTH, j, d_k), added(d_v_BGTH, j, d_v)

        zero = jnp.zeros(q.shape, wide)
        d_q, *d_kv = lax.fori_loop(oldest_block(i, mask), i + 1, pair, (zero, *d_kv))
        return tuple(d_kv), d_q.astype(dtype)

    zeros = jnp.zeros(k_BGTH.shape, wide)
    n = k_BGTH.shape[2] // BLOCK
    (d_k, d_v), d_q = lax.scan(row, (zeros, zeros), jnp.arange(n))
    d_q, d_k, d_v = (x[:, :, :T].astype(dtype) for x in (joined(d_q), d_k, d_v))
    return d_q, d_k, d_v, d_mask


attend_long.defvjp(attend_long_forward, attend_long_backward)


def oldest_block(i: jax.Array, mask: CausalMask) -> jax.Array | int:
    """The first block of keys that a query of block i can see."""
    return jnp.maximum(i * BLOCK - mask.window + 1, 0) // BLOCK if mask.window else 0


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
