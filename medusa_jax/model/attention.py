"""Grouped-query attention under a mask, for one new token, and the layer around them all."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from medusa_jax.config import LlamaConfig
from medusa_jax.model import tree_kernel
from medusa_jax.model.cache import write_rows
from medusa_jax.model.causal import attend_behind
from medusa_jax.model.kernels import attend_rows
from medusa_jax.model.layers import Linear, RMSNorm
from medusa_jax.model.online_softmax import Causal
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rotate
from medusa_jax.native import rotate_native


def attend(
    q_BTNH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Grouped-query attention of T queries over S slots; softmax in float32 or wider.

    The N // G query heads of a group are folded into the query rows, so that keys and values
    are read once per group.

    Returns: [B, T, N * H].
    """
    B, T, N, H = q_BTNH.shape
    G, S = k_BGSH.shape[1], k_BGSH.shape[2]
    R = N // G
    wide = at_least_f32(q_BTNH.dtype)
    # Scaling the queries instead of the scores saves a pass over [.., T, S].
    q_BTNH = (q_BTNH.astype(wide) * H**-0.5).astype(q_BTNH.dtype)
    q_BGQH = q_BTNH.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4).reshape(B, G, T * R, H)
    # Keys times queries: the other way round a CPU transposes all keys first.
    score_BGSQ = lax.dot_general(
        k_BGSH.astype(q_BTNH.dtype),
        q_BGQH,
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    score = jnp.swapaxes(score_BGSQ, 2, 3).reshape(B, G, T, R, S)
    score = jnp.where(mask_BTS[:, None, :, None, :], score, jnp.finfo(wide).min)
    weight = jax.nn.softmax(score, axis=-1).astype(q_BTNH.dtype)
    out_BGQH = lax.dot_general(
        weight.reshape(B, G, T * R, S),
        v_BGSH.astype(q_BTNH.dtype),
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    ).astype(q_BTNH.dtype)
    return out_BGQH.reshape(B, G, T, R, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N * H)


def attend_one(
    q_B1NH: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    start_B: jax.Array,
    mask_B1S: jax.Array,
) -> jax.Array:
    """`attend` for one new token per row, whose key and value are not in the cache yet.

    Reading them from the cache that they are written to makes XLA write every cache twice and
    copy it twice on a CPU, whole: with the text, that soon costs more than the weights.

    Args:
      new: key and value of the new token, each [B, G, 1, H]; they belong to slot `start_B`.
      cache: keys and values [B, G, S, H] without them.

    Returns: [B, 1, N * H].
    """
    B, _, N, H = q_B1NH.shape
    G, S = cache[0].shape[1], cache[0].shape[2]
    dtype, wide = q_B1NH.dtype, at_least_f32(q_B1NH.dtype)
    dot = functools.partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    q_BGRH = (q_B1NH.astype(wide) * H**-0.5).astype(dtype).reshape(B, G, N // G, H)
    k_BGSH, v_BGSH = (x.astype(dtype) for x in cache)
    k_BG1H, v_BG1H = (x.astype(dtype) for x in new)
    # Keys times queries, as in `attend`.
    score_BGRS = jnp.swapaxes(dot(k_BGSH, q_BGRH, (((3,), (3,)), ((0, 1), (0, 1)))), 2, 3)
    own_BGR1 = dot(q_BGRH, k_BG1H, (((3,), (3,)), ((0, 1), (0, 1))))
    own_B11S = (jnp.arange(S)[None, :] == start_B[:, None])[:, None, None, :]
    score_BGRS = jnp.where(own_B11S, own_BGR1, score_BGRS)
    score_BGRS = jnp.where(mask_B1S[:, None], score_BGRS, jnp.finfo(wide).min)
    weight_BGRS = jax.nn.softmax(score_BGRS, axis=-1)
    own_weight_BGR1 = jnp.sum(jnp.where(own_B11S, weight_BGRS, 0), axis=-1, keepdims=True)
    weight_BGRS = jnp.where(own_B11S, 0, weight_BGRS)
    out_BGRH = dot(weight_BGRS.astype(dtype), v_BGSH, (((3,), (2,)), ((0, 1), (0, 1))))
    out_BGRH += own_weight_BGR1 * v_BG1H.astype(wide)
    return out_BGRH.astype(dtype).reshape(B, 1, N * H)


Pair = tuple[jax.Array, jax.Array]


class Paths(struct.PyTreeNode):
    """What a new token sees in layers that `native` computes whole: the cached text, the path to itself.

    Attributes:
      mask_TT: [t, s] is True where new token s lies on the path to t, itself included.
      window: of these positions, only the last `window`; 0: all.
    """

    mask_TT: jax.Array
    window: int = struct.field(pytree_node=False, default=0)


# Who sees what: a mask [B, T, S] over the slots of a cache, paths through the new tokens after it,
# or the order of a text.
Sees = jax.Array | Paths | Causal

# At most this many tokens of a text, an accepted path, are scored against all slots of a cache at once, as
# the nodes of a tree are; more, those of a prompt, against the slots that count.
FEW = 16


def write_both(cache: Pair, new: Pair, start_B: jax.Array) -> Pair:
    """Keys and values of new tokens in their slots."""
    return write_rows(cache[0], new[0], start_B), write_rows(cache[1], new[1], start_B)


def write_behind(cache: Pair, new: Pair, start_B: jax.Array, read_BTD: jax.Array) -> Pair:
    """`write_both`, ordered after the reads from the same cache.

    Written after it was read, the cache changes in place instead of being copied whole; XLA
    keeps that order only if what is written depends on what was read.
    """
    nothing_B111 = (read_BTD[:, 0, 0] * 0).astype(new[0].dtype)[:, None, None, None]
    return write_both(cache, (new[0] + nothing_B111, new[1] + nothing_B111), start_B)


def tree_mask(slots: int, start_B: jax.Array, self_mask_TR: jax.Array) -> jax.Array:
    """What new tokens see of a cache [B, T, S]: the text and, of R rows after it, those of the mask.

    Args:
      start_B: where the text ends.
      self_mask_TR: [t, r] is True where token t sees row r after the text.
    """
    R = self_mask_TR.shape[1]
    offset_BS = jnp.arange(slots)[None, :] - start_B[:, None]
    # Column of each slot in the tokens' own mask; slots outside it are clipped away.
    inside_BS = (offset_BS >= 0) & (offset_BS < R)
    own_BTS = jnp.take(self_mask_TR, jnp.clip(offset_BS, 0, R - 1), axis=1)
    own_BTS = jnp.moveaxis(own_BTS, 0, 1) & inside_BS[:, None, :]
    return (offset_BS < 0)[:, None, :] | own_BTS


@jax.named_scope("attention")
def attention_of(
    q_BTNH: jax.Array,
    new: Pair,
    sees: Sees,
    cache: Pair | None,
    start_B: jax.Array | None,
) -> tuple[jax.Array, Pair]:
    """The output [B, T, N * H], and the cache with the new keys and values (these alone without one)."""
    if cache is None:
        assert isinstance(sees, Causal)
        return attend_rows(q_BTNH, *new, sees), new
    assert start_B is not None and not isinstance(sees, Paths)
    if isinstance(sees, Causal):
        out_BTD = attend_behind(q_BTNH, new, cache, start_B, sees.window)
        return out_BTD, write_behind(cache, new, start_B, out_BTD)
    if q_BTNH.shape[1] == 1:
        out_BTD = attend_one(q_BTNH, new, cache, start_B, sees)
        return out_BTD, write_behind(cache, new, start_B, out_BTD)
    kept = write_both(cache, new, start_B)
    if tree_kernel.fits(q_BTNH, kept[0]):
        return tree_kernel.attend_tree(q_BTNH, *kept, sees, start_B + q_BTNH.shape[1]), kept
    return attend(q_BTNH, *kept, sees), kept


class Attention(nn.Module):
    """Self-attention; the caller passes the rotation, who sees what and (decoding) the cache.

    With the output it gives the cache with the new keys and values, or these alone if there is none.
    """

    config: LlamaConfig
    dtype: Any
    shards: int
    native: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        sees: Sees,
        cache: Pair | None = None,
        start_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Pair]:
        c = self.config
        B, T, _ = x_BTD.shape
        sizes = [
            c.n_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
        ]
        if self.shards:
            fused = Linear(sum(sizes), c.qkv_bias, self.dtype, self.shards, name="qkv_proj")
            cuts = np.cumsum(sizes)[:2] // self.shards
            q, k, v = jnp.split(fused(x_BTD), cuts, axis=-1)
        else:
            q, k, v = (
                Linear(size, c.qkv_bias, self.dtype, name=name)(x_BTD)
                for size, name in zip(sizes, ("q_proj", "k_proj", "v_proj"))
            )
        q_BTNH = q.reshape(B, T, c.n_heads, c.head_dim)
        k_BTGH = k.reshape(B, T, c.n_kv_heads, c.head_dim)
        v_BTGH = v.reshape(B, T, c.n_kv_heads, c.head_dim)
        if c.qk_norm:
            norm = functools.partial(RMSNorm, c.rms_eps, self.dtype, self.native)
            q_BTNH = norm(name="q_norm")(q_BTNH)
            k_BTGH = norm(name="k_norm")(k_BTGH)
        turn = rotate_native if self.native else rotate
        q_BTNH = turn(q_BTNH, *rope)
        k_BGTH = turn(k_BTGH, *rope).transpose(0, 2, 1, 3)
        v_BGTH = v_BTGH.transpose(0, 2, 1, 3)
        new = (k_BGTH, v_BGTH)
        out_BTD, kept = attention_of(q_BTNH, new, sees, cache, start_B)
        return Linear(c.d_model, c.out_bias, self.dtype, name="o_proj")(out_BTD), kept
