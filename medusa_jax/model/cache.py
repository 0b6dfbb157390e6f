"""The key/value cache: one (k, v) pair per layer, written before masked attention reads it.

Slots [0, length) of a row hold its committed text. A decode step writes its M candidates to
slots [length, length + M); they are invisible to every other pass, and `Kernels.commit` moves the
accepted ones to the front of that range. Per-layer arrays, not one stacked array: a stacked
cache is copied whole by every layer's update.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
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
