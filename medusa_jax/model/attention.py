"""Grouped-query attention of new tokens under a mask, and the layer around it."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.config import LlamaConfig
from medusa_jax.model import tree_kernel
from medusa_jax.model.cache import write_rows
from medusa_jax.model.causal import (
    CausalMask,
    attend_cached,
    attend_levels,
    dot,
    flat,
    folded,
    grouped,
    products,
)
from medusa_jax.model.engine import Pair, cpu
from medusa_jax.model.kernels import attend_rows, cached_kernel, cudnn_cached
from medusa_jax.model.layers import Linear, RMSNorm
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rotate


def attend(
    q_BTNH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Grouped-query attention of T queries over S slots; softmax in float32 or wider.

    The N // G query heads of a group are folded into the query rows, so that keys and values
    are read once per group.

    Returns: [B, T, N * H].
    """
    B, T, _, H = q_BTNH.shape
    G, S = k_BGSH.shape[1], k_BGSH.shape[2]
    dtype, wide = q_BTNH.dtype, at_least_f32(q_BTNH.dtype)
    # Scaling the queries instead of the scores saves a pass over [.., T, S].
    q_BGTRH = grouped((q_BTNH.astype(wide) * H**-0.5).astype(dtype), G)
    score_BGQS = products(folded(q_BGTRH), k_BGSH.astype(dtype))
    score_BGTRS = score_BGQS.reshape(B, G, T, -1, S)
    score_BGTRS = jnp.where(mask_BTS[:, None, :, None], score_BGTRS, jnp.finfo(wide).min)
    weight_BGTRS = jax.nn.softmax(score_BGTRS, axis=-1).astype(dtype)
    out_BGQH = dot(folded(weight_BGTRS), v_BGSH.astype(dtype), 3, 2).astype(dtype)
    return flat(out_BGQH.reshape(q_BGTRH.shape))


def attend_one(
    q_B1NH: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    start_B: jax.Array,
    mask_B1S: jax.Array,
) -> jax.Array:
    """`attend` for one new token per row, whose key and value are not in the cache yet.

    Reading them from the cache that they are written to makes XLA write every cache twice and
    copy it twice on a CPU, which for longer texts costs more than reading the weights.

    Args:
      new: key and value of the new token, each [B, G, 1, H]; they belong to slot `start_B`.
      cache: keys and values [B, G, S, H] without them.

    Returns: [B, 1, N * H].
    """
    B, _, N, H = q_B1NH.shape
    G, S = cache[0].shape[1], cache[0].shape[2]
    dtype, wide = q_B1NH.dtype, at_least_f32(q_B1NH.dtype)
    q_BGRH = (q_B1NH.astype(wide) * H**-0.5).astype(dtype).reshape(B, G, N // G, H)
    k_BGSH, v_BGSH = (x.astype(dtype) for x in cache)
    k_BG1H, v_BG1H = (x.astype(dtype) for x in new)
    score_BGRS = products(q_BGRH, k_BGSH)
    own_BGR1 = dot(q_BGRH, k_BG1H, 3, 3)
    own_B11S = (jnp.arange(S)[None, :] == start_B[:, None])[:, None, None, :]
    score_BGRS = jnp.where(own_B11S, own_BGR1, score_BGRS)
    score_BGRS = jnp.where(mask_B1S[:, None], score_BGRS, jnp.finfo(wide).min)
    weight_BGRS = jax.nn.softmax(score_BGRS, axis=-1)
    own_weight_BGR1 = jnp.sum(jnp.where(own_B11S, weight_BGRS, 0), axis=-1, keepdims=True)
    weight_BGRS = jnp.where(own_B11S, 0, weight_BGRS)
    out_BGRH = dot(weight_BGRS.astype(dtype), v_BGSH, 3, 2)
    out_BGRH += own_weight_BGR1 * v_BG1H.astype(wide)
    return out_BGRH.astype(dtype).reshape(B, 1, N * H)


class PathMask(struct.PyTreeNode):
    """Visibility in layers that the CPU engine computes whole: the cached text and the path to the token itself.

    Attributes:
      mask_TT: [t, s] is True where new token s is on the path to t, itself included.
      window: of these positions, only the last `window`; 0: all.
    """

    mask_TT: jax.Array
    window: int = struct.field(pytree_node=False, default=0)


class LevelCache(struct.PyTreeNode):
    """What a level of drafts in training attends to, per layer (`heads/autoregressive.py`).

    Attributes:
      text: keys and values [B, G, T, H] of the first level; row t sees those of rows up to t.
      levels: of the levels after it; row t sees row t.
    """

    text: Pair
    levels: tuple[Pair, ...] = ()


LayerCache = Pair | LevelCache

# What each token sees: [B, T, S] over the slots of a cache, the cached text and a path of new tokens, or
# the text before it.
Mask = jax.Array | PathMask | CausalMask

# Up to this many tokens of a text (an accepted path) are scored against all slots of a cache at once, as the
# nodes of a tree are; longer texts (prompts) against the slots in use.
MAX_MASKED = 16


def write_both(cache: Pair, new: Pair, start_B: jax.Array) -> Pair:
    """Write keys and values of new tokens to their slots."""
    return write_rows(cache[0], new[0], start_B), write_rows(cache[1], new[1], start_B)


def write_after(cache: Pair, new: Pair, start_B: jax.Array, read_BTD: jax.Array) -> Pair:
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


def cached_mask(
    T: int, slots: int, start_B: jax.Array, self_mask_TR: jax.Array | None = None
) -> Mask:
    """What T tokens after a cached text see: the text, and each other by `self_mask` (None: causally)."""
    if self_mask_TR is not None:
        return tree_mask(slots, start_B, self_mask_TR)
    if T > MAX_MASKED:
        return CausalMask()
    return tree_mask(slots, start_B, jnp.asarray(np.tri(T, dtype=bool)))


@jax.named_scope("attention")
def attention_of(
    q_BTNH: jax.Array,
    new: Pair,
    mask: Mask,
    cache: LayerCache | None,
    start_B: jax.Array | None,
) -> tuple[jax.Array, LayerCache]:
    """The output [B, T, N * H], and the cache with the new keys and values (only these without a cache)."""
    if cache is None:
        assert isinstance(mask, CausalMask)
        return attend_rows(q_BTNH, *new, mask), new
    if isinstance(cache, LevelCache):
        assert isinstance(mask, CausalMask)
        levels = (*cache.levels, new)
        return attend_levels(q_BTNH, cache.text, levels, mask), cache.replace(levels=levels)
    assert start_B is not None and not isinstance(mask, PathMask)
    if isinstance(mask, CausalMask):
        out_BTD = attend_cached(q_BTNH, new, cache, start_B, mask.window)
        return out_BTD, write_after(cache, new, start_B, out_BTD)
    kernel = cached_kernel(q_BTNH, cache[0], new[0].shape[2])
    if new[0].shape[2] == 1 and kernel == "own":
        out_BTD = attend_one(q_BTNH, new, cache, start_B, mask)
        return out_BTD, write_after(cache, new, start_B, out_BTD)
    cache = write_both(cache, new, start_B)
    if kernel == "tree":
        end_B = start_B + new[0].shape[2]
        return tree_kernel.attend_tree(q_BTNH, *cache, mask, end_B), cache
    run = cudnn_cached if kernel == "cudnn" else attend
    return run(q_BTNH, *cache, mask), cache


def row_of(x_BT: jax.Array, row_B: jax.Array | None) -> jax.Array:
    """One row of each, [B, T, ...] -> [B, 1, ...], the last if there are not as many; None: all rows."""
    if row_B is None:
        return x_BT
    return jax.vmap(lambda x_T, row: lax.dynamic_slice_in_dim(x_T, row, 1))(x_BT, row_B)


class Attention(nn.Module):
    """Self-attention; the caller passes the rotation, the mask and (in decoding) the cache.

    With `only_B` the output is that of one new token per row, [B, 1, D], which sees the cached text and
    the new tokens up to itself; the others have keys and values only.

    Returns the output, and the cache with the new keys and values (only these without a cache).
    """

    config: LlamaConfig
    dtype: DTypeLike
    shards: int
    native: bool = False

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask: Mask,
        cache: LayerCache | None = None,
        start_B: jax.Array | None = None,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        c = self.config
        B, T, _ = x_BTD.shape
        asked_BTD = row_of(x_BTD, only_B)
        if only_B is not None:
            assert isinstance(cache, tuple) and start_B is not None and not self.shards
            slots, itself = cache[0].shape[2], jnp.ones((1, 1), bool)
            mask = tree_mask(slots, start_B + only_B, itself)
        sizes = [
            c.n_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
        ]
        if self.shards:
            fused = Linear(sum(sizes), c.qkv_bias, self.dtype, self.shards, name="qkv_proj")
            cuts = np.cumsum(sizes)[:2] // self.shards
            out = fused(x_BTD)
            # Split without the axis of one shard, whose slices a TPU would lay out twice.
            out = out.reshape(B, T, -1) if self.shards == 1 else out
            q, k, v = jnp.split(out, cuts, axis=-1)
        else:
            q, k, v = (
                Linear(size, c.qkv_bias, self.dtype, name=name)(x)
                for size, name, x in zip(
                    sizes, ("q_proj", "k_proj", "v_proj"), (asked_BTD, x_BTD, x_BTD)
                )
            )
        q_BTNH = q.reshape(B, -1, c.n_heads, c.head_dim)
        k_BTGH = k.reshape(B, T, c.n_kv_heads, c.head_dim)
        v_BTGH = v.reshape(B, T, c.n_kv_heads, c.head_dim)
        if c.qk_norm:
            norm = functools.partial(RMSNorm, c.rms_eps, self.dtype, self.native)
            q_BTNH = norm(name="q_norm")(q_BTNH)
            k_BTGH = norm(name="k_norm")(k_BTGH)
        turn = cpu().rotate if self.native else rotate
        q_BTNH = turn(q_BTNH, *(row_of(x, only_B) for x in rope))
        k_BGTH = turn(k_BTGH, *rope).transpose(0, 2, 1, 3)
        v_BGTH = v_BTGH.transpose(0, 2, 1, 3)
        new = (k_BGTH, v_BGTH)
        out_BTD, written = attention_of(q_BTNH, new, mask, cache, start_B)
        return Linear(c.d_model, c.out_bias, self.dtype, name="o_proj")(out_BTD), written
