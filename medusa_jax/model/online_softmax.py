"""Attention over many keys, merged from attention over blocks of them.

The running softmax of Milakov and Gimelshein (2018), as in FlashAttention (Dao et al. 2022): a part
keeps the largest score, the sum of the exponentials and the output before division by that sum, and
two parts merge into one. So no array has both all queries and all keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.model.product import at_least_f32


class Causal(struct.PyTreeNode):
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
