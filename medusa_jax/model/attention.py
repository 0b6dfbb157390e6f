"""Attention of new tokens: `attention_of` chooses the path, in this order.

| new tokens of a row             | cache            | platform            | path                               |
|---------------------------------|------------------|---------------------|------------------------------------|
| one, a tree or a short path     | the text before  | one CPU; float32    | `cpu.layer`, from `layers.Block`   |
| levels or blocks of drafts      | a `DraftCache`   | any                 | its `attend`                       |
| packed texts, in training       | none             | CUDA, TPU; 16 bits  | `kernels.cudnn`, `tpu.splash`      |
|                                 |                  | else                | `texts.attend_text`                |
| a piece of a prompt             | the text before  | any                 | `texts.attend_cached`              |
| one, a tree or a short path     | the text before  | TPU; 16 bits        | `tpu.attend_tree`                  |
| one                             | the text before  | else                | `attend` before the write          |
| a tree or a short path          | the text before  | else                | `attend` after the write           |

Two functions of `model/kernels.py` decide which shapes its kernels take. MEDUSA_JAX_ATTENTION=own disables
all kernels.
"""

import jax
import jax.numpy as jnp

from medusa_jax.devices.platforms import platform
from medusa_jax.model.cache import DraftCache, LayerCache, write_after, write_both
from medusa_jax.model.grouped import dot, flat, fold_queries, group_queries, products
from medusa_jax.model.masks import CausalMask, Mask, PathMask
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.seams import Pair, attention_kernels
from medusa_jax.model.texts import attend_cached, attend_text


@jax.named_scope("attention")
def attention_of(
    q_BTNH: jax.Array,
    new: Pair,
    mask: Mask,
    cache: LayerCache | None,
    start_B: jax.Array | None,
) -> tuple[jax.Array, LayerCache]:
    """The output [B, T, N * H], and the cache with the new keys and values (only these without a cache)."""
    if isinstance(cache, DraftCache):
        return cache.attend(q_BTNH, new, mask)
    kernels, n_new = attention_kernels(), new[0].shape[2]
    if cache is None:
        assert isinstance(mask, CausalMask)
        kernel = kernels.for_text(platform(), q_BTNH) if kernels else None
        return (kernel or attend_text)(q_BTNH, *new, mask), new
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
