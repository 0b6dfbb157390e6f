"""Attention of new tokens, by the method of the kernels for the kind of mask and cache (`model/kernels.py`)."""

import jax

from medusa_jax.model.cache import Pair
from medusa_jax.model.draft_caches import DraftCache, LayerCache
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask, LayerMask, Mask


@jax.named_scope("attention")
def attention_of(
    kernels: Kernels,
    q_BTNH: jax.Array,
    new: Pair,
    mask: Mask,
    cache: LayerCache | None,
    start_B: jax.Array | None,
) -> tuple[jax.Array, LayerCache]:
    """The output [B, T, N * H], and the cache with the new keys and values (only these without a cache)."""
    if isinstance(cache, DraftCache):
        return cache.attend(kernels, q_BTNH, new, mask)
    if cache is None:
        assert isinstance(mask, CausalMask)
        return kernels.attend_text(q_BTNH, *new, mask), new
    assert start_B is not None and not isinstance(mask, LayerMask)
    if isinstance(mask, CausalMask):
        out_BTD = kernels.attend_prompt(q_BTNH, new, cache, start_B, mask.window)
        return out_BTD, kernels.write_after(cache, new, start_B, out_BTD)
    return kernels.attend_tree(q_BTNH, new, cache, mask, start_B)
