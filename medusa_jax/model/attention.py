"""Attention of new tokens: the choice of implementation, and the implementations in XLA.

| new tokens of a row             | cache             | platform            | path                                |
|---------------------------------|-------------------|---------------------|-------------------------------------|
| packed texts, in training       | none              | CUDA, TPU; 16 bits  | `kernels.cudnn`, `tpu.splash`       |
|                                 |                   | else                | `attend_text`                       |
| a level of drafts, in training  | the levels above  | any                 | `attend_levels`                     |
| blocks of drafts                | the text before   | any                 | `attend_blocks`                     |
| a piece of a prompt             | the text before   | any                 | `attend_cached`                     |
| one, a tree or a short path     | the text before   | one CPU; float32    | `cpu.layer`: the layer (`Block`)    |
|                                 |                   | TPU; 16 bits        | `tpu.attend_tree`                   |
| a tree or a short path          | the text before   | else                | `attend` after the write            |
| one                             | the text before   | else                | `attend` before the write           |

Two functions of `model/kernels.py` decide which shapes its kernels take. MEDUSA_JAX_ATTENTION=own disables
all kernels.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from medusa_jax.devices.platforms import platform
from medusa_jax.model.cache import write_rows
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.seams import Pair, attention_kernels
from medusa_jax.sharding import PyTree

# Up to this many tokens of a text (an accepted path) are scored against all slots of a cache at once, like the
# nodes of a tree; longer texts (prompts) only against the slots in use.
MAX_MASKED = 16
# Queries of a text per block, and cache slots per block for a piece of a prompt.
BLOCK = 64
SLOTS = 512
# Number of spans of a text; queries are scored against the keys up to their span's end. More spans waste fewer
# scores but compile more code.
SPANS = 4


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
        """Visibility of S tokens, from position `first`, to T tokens, from `begin`: [B or 1, T, S]."""
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


class PathMask(struct.PyTreeNode):
    """Visibility in whole layers of the CPU engine: the cached text and the path to the token itself.

    Attributes:
      mask_TR: [t, r] is True where row r after the text is on the path to new token t, itself included. The
        new tokens are the last T of the rows.
      window: of these positions, only the last `window`; 0: all.
    """

    mask_TR: jax.Array
    window: int = struct.field(pytree_node=False, default=0)


class LevelCache(struct.PyTreeNode):
    """Keys and values that a level of drafts in training attends to, per layer (`heads/autoregressive.py`).

    Attributes:
      text: keys and values [B, G, T, H] of the first level; row t sees rows up to t.
      levels: keys and values of the levels after the first; row t sees row t.
    """

    text: Pair
    levels: tuple[Pair, ...] = ()


class BlockCache(struct.PyTreeNode):
    """Keys and values that blocks of drafts attend to, per layer (`heads/dflash.py`).

    Attributes:
      text: keys and values [B, G, S, H] of the text.
      visible_BAS: the slots of the text that each of A blocks sees; its tokens also see each other.
    """

    text: Pair
    visible_BAS: jax.Array


LayerCache = Pair | LevelCache | BlockCache

# Which tokens each token sees: a mask [B, T, S] over cache slots, the cached text and a path of new tokens, or
# the earlier text.
Mask = jax.Array | PathMask | CausalMask


def tree_mask(slots: int, start_B: jax.Array, self_mask_TR: jax.Array) -> jax.Array:
    """The cache slots that new tokens see [B, T, S]: the text, and the slots of the R rows after it in the mask.

    Args:
      start_B: where the text ends.
      self_mask_TR: [t, r] is True where token t sees row r after the text.
    """
    R = self_mask_TR.shape[1]
    offset_BS = jnp.arange(slots)[None, :] - start_B[:, None]
    # Column of each slot in `self_mask_TR`; other slots are clipped and masked.
    inside_BS = (offset_BS >= 0) & (offset_BS < R)
    own_BTS = jnp.take(self_mask_TR, jnp.clip(offset_BS, 0, R - 1), axis=1)
    own_BTS = jnp.moveaxis(own_BTS, 0, 1) & inside_BS[:, None, :]
    return (offset_BS < 0)[:, None, :] | own_BTS


@jax.named_scope("attention")
def attention_of(
    q_BTNH: jax.Array,
    new: Pair,
    mask: Mask,
    cache: LayerCache | None,
    start_B: jax.Array | None,
) -> tuple[jax.Array, LayerCache]:
    """The output [B, T, N * H], and the cache with the new keys and values (only these without a cache)."""
    kernels, n_new = attention_kernels(), new[0].shape[2]
    if cache is None:
        assert isinstance(mask, CausalMask)
        kernel = kernels.for_text(platform(), q_BTNH) if kernels else None
        return (kernel or attend_text)(q_BTNH, *new, mask), new
    if isinstance(cache, LevelCache):
        assert isinstance(mask, CausalMask)
        levels = (*cache.levels, new)
        return attend_levels(q_BTNH, cache.text, levels, mask), cache.replace(levels=levels)
    if isinstance(cache, BlockCache):
        return attend_blocks(q_BTNH, new, cache), cache
    assert start_B is not None and not isinstance(mask, PathMask)
    if isinstance(mask, CausalMask):
        out_BTD = attend_cached(q_BTNH, new, cache, start_B, mask.window)
        return out_BTD, write_after(cache, new, start_B, out_BTD)
    kernel = kernels.for_cache(platform(), q_BTNH, cache[0], n_new) if kernels else None
    if kernel is None and n_new == 1:
        out_BTD = attend(q_BTNH, *cache, mask, new, start_B)
        return out_BTD, write_after(cache, new, start_B, out_BTD)
    cache = write_both(cache, new, start_B)
    if kernel is None:
        return attend(q_BTNH, *cache, mask), cache
    return kernel(q_BTNH, *cache, mask, start_B + n_new), cache


def write_both(cache: Pair, new: Pair, start_B: jax.Array) -> Pair:
    """Write keys and values of new tokens to their slots."""
    return write_rows(cache[0], new[0], start_B), write_rows(cache[1], new[1], start_B)


def write_after(cache: Pair, new: Pair, start_B: jax.Array, read_BTD: jax.Array) -> Pair:
    """`write_both`, ordered after the reads from the same cache.

    If the write follows the reads, the cache changes in place instead of being copied whole; XLA
    keeps this order only if the new values depend on the values read.
    """
    nothing_B111 = (read_BTD[:, 0, 0] * 0).astype(new[0].dtype)[:, None, None, None]
    return write_both(cache, (new[0] + nothing_B111, new[1] + nothing_B111), start_B)


# Attention over a whole cache.


def attend(
    q_BTNH: jax.Array,
    k_BGSH: jax.Array,
    v_BGSH: jax.Array,
    mask_BTS: jax.Array,
    new: Pair | None = None,
    start_B: jax.Array | None = None,
) -> jax.Array:
    """Grouped-query attention of T queries over S slots; softmax in float32 or wider.

    The N // G query heads of a group are folded into the query rows, which reads keys and values
    once per group.

    Args:
      new: key and value of one new token [B, G, 1, H] for slot `start_B`, not written yet. If they are read
        from the cache after the write, XLA for CPU writes and copies every cache twice, which for longer
        texts costs more than reading the weights.

    Returns: [B, T, N * H].
    """
    B, T, _, H = q_BTNH.shape
    G, S = k_BGSH.shape[1], k_BGSH.shape[2]
    dtype, wide = q_BTNH.dtype, at_least_f32(q_BTNH.dtype)
    # Scaling the queries instead of the scores saves a pass over [.., T, S].
    q_BGTRH = group_queries((q_BTNH.astype(wide) * H**-0.5).astype(dtype), G)
    q_BGQH = fold_queries(q_BGTRH)
    score_BGQS = products(q_BGQH, k_BGSH.astype(dtype))
    if new is not None and start_B is not None:
        k_BG1H, v_BG1H = (x.astype(dtype) for x in new)
        own_B11S = (jnp.arange(S)[None, :] == start_B[:, None])[:, None, None, :]
        score_BGQS = jnp.where(own_B11S, dot(q_BGQH, k_BG1H, 3), score_BGQS)
    score_BGTRS = score_BGQS.reshape(B, G, T, -1, S)
    score_BGTRS = jnp.where(mask_BTS[:, None, :, None], score_BGTRS, jnp.finfo(wide).min)
    weight_BGQS = fold_queries(jax.nn.softmax(score_BGTRS, axis=-1))
    if new is None:
        out_BGQH = dot(weight_BGQS.astype(dtype), v_BGSH.astype(dtype), 2)
    else:
        own_BGQ1 = jnp.sum(jnp.where(own_B11S, weight_BGQS, 0), axis=-1, keepdims=True)
        weight_BGQS = jnp.where(own_B11S, 0, weight_BGQS)
        out_BGQH = dot(weight_BGQS.astype(dtype), v_BGSH.astype(dtype), 2)
        out_BGQH += own_BGQ1 * v_BG1H.astype(wide)
    return flat(out_BGQH.astype(dtype).reshape(q_BGTRH.shape))


# Attention over texts, in parts of their keys, merged by the running softmax of Milakov and Gimelshein (2018), as in
# FlashAttention (Dao et al. 2022). No array has both all queries and all keys.


class Part(NamedTuple):
    """Attention of queries over some of their keys; all in float32 or wider.

    Attributes:
      out_BGTRH: the mean of the values, weighted by exp(score).
      norm_BGTR1: the logarithm of the sum of exp(score).
    """

    out_BGTRH: jax.Array
    norm_BGTR1: jax.Array


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
    out = dot(fold_queries(weight.astype(dtype)), v_BGSH.astype(dtype), 2)
    return Part(out.reshape(q_BGTRH.shape) / total, top + jnp.log(total))


def scores(q_BGTRH: jax.Array, k_BGSH: jax.Array, visible_BTS: jax.Array) -> jax.Array:
    """Scaled products [B, G, T, R, S] in float32 or wider; invisible keys get the type's minimum."""
    B, G, T, R, H = q_BGTRH.shape
    score = dot(fold_queries(q_BGTRH), k_BGSH.astype(q_BGTRH.dtype), 3)
    score = score.reshape(B, G, T, R, -1) * (H**-0.5)
    return jnp.where(visible_BTS[:, None, :, None, :], score, jnp.finfo(score.dtype).min)


def merge_parts(a: Part, b: Part) -> Part:
    """Attention over the keys of both; every query must see a key of a."""
    norm = jnp.logaddexp(a.norm_BGTR1, b.norm_BGTR1)
    share_a, share_b = jnp.exp(a.norm_BGTR1 - norm), jnp.exp(b.norm_BGTR1 - norm)
    return Part(a.out_BGTRH * share_a + b.out_BGTRH * share_b, norm)


def attend_text(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> jax.Array:
    """Attention within whole rows: [B, T, N * H]."""
    part = text_part(group_queries(q_BTNH, k_BGTH.shape[1]), k_BGTH, v_BGTH, mask)
    return flat(part.out_BGTRH.astype(q_BTNH.dtype))


def attend_levels(
    q_BTNH: jax.Array, text: Pair, levels: Sequence[Pair], mask: CausalMask
) -> jax.Array:
    """Attention of row t over the rows of the text up to t and over row t of each level: [B, T, N * H].

    Args:
      text: keys and values [B, G, T, H], as for `attend_text`.
      levels: such keys and values for each level.
    """
    q_BGTRH = group_queries(q_BTNH, text[0].shape[1])
    part = text_part(q_BGTRH, *text, mask)
    wide = part.norm_BGTR1.dtype
    for level in levels:  # each query has one key per level: sums, not matrix products
        k, v = (x[:, :, :, None].astype(wide) for x in level)
        score = jnp.sum(q_BGTRH.astype(wide) * k, -1, keepdims=True) * k.shape[-1] ** -0.5
        part = merge_parts(part, Part(v, score))
    return flat(part.out_BGTRH.astype(q_BTNH.dtype))


def attend_blocks(q_BTNH: jax.Array, new: Pair, cache: BlockCache) -> jax.Array:
    """Attention of A blocks over the text and each over itself, T = A x slots: [B, T, N * H]."""
    q_BGTRH = group_queries(q_BTNH, new[0].shape[1])
    B, A, _ = cache.visible_BAS.shape
    slots = q_BTNH.shape[1] // A

    def apart(x: jax.Array) -> jax.Array:
        """[B, G, T, ...] -> [B A, G, slots, ...]."""
        x = jnp.moveaxis(x.reshape(*x.shape[:2], A, slots, *x.shape[3:]), 2, 1)
        return x.reshape(B * A, *x.shape[2:])

    def together(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(B, A, *x.shape[1:]), 1, 2)
        return x.reshape(*x.shape[:2], A * slots, *x.shape[4:])

    both_ways = jnp.ones((1, slots, slots), bool)
    part = attend_part(apart(q_BGTRH), apart(new[0]), apart(new[1]), both_ways)
    visible_BTS = jnp.repeat(cache.visible_BAS, slots, axis=1)
    seen = attend_part(q_BGTRH, *cache.text, visible_BTS)
    part = merge_parts(jax.tree.map(together, part), seen)
    return flat(part.out_BGTRH.astype(q_BTNH.dtype))


def text_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> Part:
    """Attention of a text over itself.

    A CPU processes one row at a time, so that its scores fit the CPU's cache. On several devices a loop over rows
    would gather them all on each.
    """
    given = (q_BGTRH, k_BGTH, v_BGTH, mask)
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "cpu" or not (mesh.empty or mesh.size == 1):
        return blocks_part(*given)

    @jax.checkpoint
    def row(given: tuple[PyTree, ...]) -> Part:
        part = blocks_part(*jax.tree.map(lambda x: x[None], given))
        return jax.tree.map(lambda x: x[0], part)

    return lax.map(row, given)


def blocks_part(
    q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
) -> Part:
    """Attention of a text over itself, by blocks of queries.

    The backward pass recomputes a block's scores, so memory grows linearly with the text.
    """
    T = q_BGTRH.shape[2]
    q_BGTRH, k_BGTH, v_BGTH, mask = whole_blocks(q_BGTRH, k_BGTH, v_BGTH, mask)
    n_blocks = q_BGTRH.shape[2] // BLOCK
    ends = sorted({-(-n_blocks * i // SPANS) for i in range(SPANS + 1)})

    def span(begin: int, end: int) -> Part:
        first = max(0, begin * BLOCK - mask.window + 1) if mask.window else 0
        keys, values = (x[:, :, first : end * BLOCK] for x in (k_BGTH, v_BGTH))

        @jax.checkpoint
        def one(i: jax.Array) -> Part:
            visible_BQS = mask.visible(i * BLOCK, BLOCK, first, keys.shape[2])
            return attend_part(block(q_BGTRH, i), keys, values, visible_BQS)

        return lax.map(one, jnp.arange(begin, end))

    parts = [span(*edges) for edges in itertools.pairwise(ends)]
    part = jax.tree.map(lambda *x: join_blocks(jnp.concatenate(x)), *parts)
    return jax.tree.map(lambda x: x[:, :, :T], part)


def attend_cached(
    q_BTNH: jax.Array, new: Pair, cache: Pair, start_B: jax.Array, window: int
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
    q_BGTRH = group_queries(q_BTNH, cache[0].shape[1])

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
        return merge_parts(part, attend_part(q_BGTRH, k_BGSH, v_BGSH, seen_BTS))

    # The new keys come first: every token sees itself, so no running softmax starts empty.
    mask = CausalMask(window=window)
    if platform() == "cpu":
        part = blocks_part(q_BGTRH, *new, mask)
    else:  # all at once: loops over blocks cost more
        part = attend_part(q_BGTRH, *new, mask.visible(0, T, 0, T))
    oldest = jnp.maximum(jnp.min(start_B) - window + 1, 0) if window else 0
    blocks = oldest // size, -(-jnp.max(start_B) // size)
    part = lax.fori_loop(*blocks, with_block, part)
    return flat(part.out_BGTRH.astype(q_BTNH.dtype))


# Products and shapes.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(a: jax.Array, b: jax.Array, axis_b: int) -> jax.Array:
    """The last axis of a [B, G, Q, X] times axis 2 or 3 of b, batched over [B, G], in float32 or wider.

    Its gradient is rounded to their type before it is multiplied.
    """
    return _dot(a, b, 3, axis_b)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(a.dtype),
    )


def _dot_backward(axis_b: int, given: Pair, d: jax.Array) -> Pair:
    a, b = given
    d = d.astype(a.dtype)
    d_b = _dot(d, a, 2, 2) if axis_b == 3 else _dot(a, d, 2, 2)
    return _dot(d, b, 3, 5 - axis_b).astype(a.dtype), d_b.astype(b.dtype)


dot.defvjp(lambda a, b, axis_b: (dot(a, b, axis_b), (a, b)), _dot_backward)


def products(q_BGQH: jax.Array, k_BGSH: jax.Array) -> jax.Array:
    """Products of queries with the keys of a cache, in the order of the platform: [B, G, Q, S].

    A CPU takes keys times queries, since otherwise it transposes all keys first. A GPU takes queries times
    keys: a softmax across rows of memory is three more kernels in each layer.
    """
    if platform() == "cpu":
        return jnp.swapaxes(dot(k_BGSH, q_BGQH, 3), 2, 3)
    return dot(q_BGQH, k_BGSH, 3)


def fold_queries(x_BGTRX: jax.Array) -> jax.Array:
    """The queries of a group as rows: [B, G, T * R, X]."""
    return x_BGTRX.reshape(*x_BGTRX.shape[:2], -1, x_BGTRX.shape[-1])


def group_queries(q_BTNH: jax.Array, G: int) -> jax.Array:
    """Group queries by their key/value head: [B, G, T, R, H]."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 1, 3, 4)


def flat(out_BGTRH: jax.Array) -> jax.Array:
    """[B, G, T, R, H] -> [B, T, N * H]."""
    B, _, T = out_BGTRH.shape[:3]
    return out_BGTRH.transpose(0, 2, 1, 3, 4).reshape(B, T, -1)


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
    _, B, G, _, *rest = blocks.shape
    return jnp.moveaxis(blocks, 0, 2).reshape(B, G, -1, *rest)
