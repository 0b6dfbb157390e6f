"""A layer of the backbone in one call: few new tokens after a cached text, each along its path."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.native.product import Parts, numbered

Pair = tuple[jax.Array, jax.Array]


class Kernel(NamedTuple):
    """A kernel in panels, see `panel_product`, and its bias [outputs]; None: without."""

    panels: jax.Array
    parts: Parts
    scales: jax.Array | None = None
    bias: jax.Array | None = None


def layer_native(
    x_BTD: jax.Array,
    rope: Pair,
    cache: Pair,
    start_B: jax.Array,
    path_mask_TT: jax.Array,
    norms: Sequence[jax.Array | None],
    kernels: Sequence[Kernel],
    *,
    n_heads: int,
    d_ff: int,
    window: int,
    eps: float,
) -> tuple[jax.Array, Pair]:
    """x + attention(norm(x)), then that + mlp(norm(that)), in float32.

    All sums are computed in a fixed order, those over the text in the order of its
    positions, whether these lie in the cache or among the new tokens: a token comes out the same,
    bit for bit, as a node of a tree and in plain decoding, in a batch and alone.

    Args:
      rope: cos and sin of the tokens' angles, [B, T, 1, H].
      cache: keys and values [B, G, S, H]; slots [0, start) are the text. Those after it are
        written, in place where nothing else needs the old cache.
      path_mask_TT: [t, s] is True where new token s is on the path to t, itself included.
      norms: scales before attention [D] and before the MLP [D], of query heads and of key heads
        [H] (None where they have no norm).
      kernels: queries, keys and values in one; attention's output; gate and up in one; down.
      window: only the last `window` positions are seen, itself included; 0: all.

    Returns: the rows [B, T, D], and the cache with their keys and values.
    """
    f32 = jnp.float32
    nothing = jnp.zeros((0,), f32)

    def given(x: jax.Array | None) -> jax.Array:
        return nothing if x is None else x.astype(f32).reshape(-1)

    weights = [(k.panels, given(k.scales), given(k.bias)) for k in kernels]
    counts = np.array([len(k.parts) for k in kernels], np.int64)
    parts = tuple(part for k in kernels for part in k.parts)
    results = [jax.ShapeDtypeStruct(a.shape, f32) for a in (x_BTD, *cache)]
    call = jax.ffi.ffi_call("medusa_layer", results, input_output_aliases={5: 1, 6: 2})
    y_BTD, keys_BGSH, values_BGSH = call(
        x_BTD.astype(f32), *rope, start_B.astype(jnp.int32), path_mask_TT.astype(bool), *cache,
        *map(given, norms), *(operand for kernel in weights for operand in kernel),
        n_heads=np.int64(n_heads), d_ff=np.int64(d_ff), window=np.int64(window),
        counts=counts, **numbered(parts), eps=np.float64(eps),
    )  # fmt: skip
    return y_BTD, (keys_BGSH, values_BGSH)
