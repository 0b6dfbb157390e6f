"""The key/value cache: one (k, v) pair per layer, written before masked attention reads it.

Slots [0, length) of a row hold its committed text. A decode step writes its M candidates to
slots [length, length + M); they are invisible to every other pass, and `commit` moves the
accepted ones to the front of that range. Per-layer arrays, not one stacked array: a stacked
cache is copied whole by every layer's update.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig

Pair = tuple[jax.Array, jax.Array]


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer.

    Attributes:
      layers: per layer a pair (k_BGSH, v_BGSH).
    """

    layers: tuple[Pair, ...]

    @classmethod
    def zeros(
        cls,
        config: LlamaConfig,
        batch: int,
        slots: int,
        dtype: DTypeLike,
        n_layers: int | None = None,
    ) -> "KVCache":
        """An empty cache with `slots` slots per row, for all layers of this shape or for some."""
        zeros = partial(
            jnp.zeros, (batch, config.n_kv_heads, slots, config.head_dim), dtype
        )
        n_layers = config.n_layers if n_layers is None else n_layers
        return cls(layers=tuple((zeros(), zeros()) for _ in range(n_layers)))

    @property
    def slots(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    @property
    def head_dim(self) -> int:
        return self.layers[0][0].shape[3] if self.layers else 0

    def grow(self, slots: int) -> "KVCache":
        """The same rows with room for `slots` slots (never fewer than now)."""
        extra = max(0, slots - self.slots)
        return jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, extra), (0, 0))), self
        )

    @jax.named_scope("cache")
    def commit(self, length_B: jax.Array, path_BL: jax.Array) -> "KVCache":
        """Move the accepted candidates to the end of the committed text.

        Row b's slot `length + path[b, i]` is copied to slot `length + i`. A path begins with 0, the
        root, and ascends to the last accepted node. Later entries may be any of the M candidates: their
        copies land after the new length, where the next step writes.

        Example: length 10, four candidates in slots 10..13, path [0, 2, 3]: slots 10, 11, 12
        get the rows of 10, 12, 13, and the caller's new length is 13 (two drafts
        accepted after the root) or less.

        Decoding calls `Kernels.commit`, which may be faster.
        """
        source_BL = length_B[:, None] + path_BL

        # A row that has ended may lack room. Clip reads beyond its slots: the default fills NaN, which the
        # next request in the row would multiply by a weight of zero.
        def accepted(x_BGSH: jax.Array) -> jax.Array:
            if x_BGSH.shape[0] == 1:
                return jnp.take(x_BGSH, source_BL[0], axis=2, mode="clip")
            source_B1L1 = source_BL[:, None, :, None]
            return jnp.take_along_axis(x_BGSH, source_B1L1, axis=2, mode="clip")

        # On a GPU one kernel gathers for all layers; without the barrier XLA makes it one per layer.
        leaves, structure = jax.tree.flatten(self)
        rows = lax.optimization_barrier(jnp.stack([accepted(x) for x in leaves]))
        moved = [write_rows(x, new, length_B) for x, new in zip(leaves, rows)]
        return jax.tree.unflatten(structure, moved)


def write_rows(
    cache_BGSH: jax.Array, rows_BGTH: jax.Array, start_B: jax.Array, axis: int = 2
) -> jax.Array:
    """Write T consecutive slots per row, row b from slot `start_B[b]`; other code calls `Kernels.write_rows`.

    The caller keeps `start + T <= S`: XLA clamps a start that does not fit, which would
    overwrite committed text.

    Args:
      axis: the axis of the slots.
    """
    rows_BGTH = rows_BGTH.astype(cache_BGSH.dtype)
    if cache_BGSH.shape[0] == 1:  # one row needs no scatter
        return lax.dynamic_update_slice_in_dim(cache_BGSH, rows_BGTH, start_B[0], axis)
    write = partial(lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(cache_BGSH, rows_BGTH, start_B)
