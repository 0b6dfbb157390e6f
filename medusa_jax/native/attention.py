"""Attention of few new tokens over a cached text, each along its own path."""

import jax
import jax.numpy as jnp
import numpy as np

Pair = tuple[jax.Array, jax.Array]


def attend_native(
    q_BTNH: jax.Array,
    new: Pair,
    cache: Pair,
    start_B: jax.Array,
    path_mask_TT: jax.Array,
    window: int,
) -> jax.Array:
    """Grouped-query attention of T tokens over a cached text and their own ancestors.

    A token's scores, weights and values are summed up in the order of its text's positions,
    whether these lie in the cache or among the new tokens: it comes out the same, bit for bit,
    as a node of a tree and in plain decoding.

    Args:
      new: keys and values of the tokens [B, G, T, H]; they belong to slots `start_B` on.
      cache: keys and values [B, G, S, H] without them; slots [0, start) count.
      path_mask_TT: [t, s] is True where new token s lies on the path to t, itself included.
      window: only the last `window` positions are seen, itself included; 0: all.

    Returns: [B, T, N * H] in float32.
    """
    B, T, N, H = q_BTNH.shape
    f32 = [x.astype(jnp.float32) for x in (q_BTNH, *new, *cache)]
    call = jax.ffi.ffi_call(
        "medusa_attend", jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    )
    mask = path_mask_TT.astype(bool)
    out = call(*f32, start_B.astype(jnp.int32), mask, window=np.int64(window))
    return out.reshape(B, T, N * H)
