"""Kernels for TPUs. None has run on a TPU yet; the compiler's estimates guided their choices (research/log/)."""

from dataclasses import dataclass
from typing import ClassVar

import jax

from medusa_jax.kernels import tpu_operations
from medusa_jax.kernels.by_row import by_row, takes_rows
from medusa_jax.model.cache import KVCache, Pair
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask

# From this many slots on, summed over all rows, the attention kernel also runs for one token per row: over
# fewer slots XLA's attention of one token is faster.
ONE_ROW_SLOTS = 8192


@dataclass(frozen=True)
class TpuKernels(Kernels):
    """The forms that are fastest on TPUs, by the compiler's estimates.

    Attributes:
      attention: attention may be splash attention's, and our kernel's over a cache.
    """

    attention: bool = True

    # The fastest by the compiler's estimate.
    thresholds_at_once: ClassVar[int] = 4

    def attend_text(
        self, q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> jax.Array:
        if not (self.attention and splash_takes(q_BTNH)):
            return super().attend_text(q_BTNH, k_BGTH, v_BGTH, mask)
        return by_row(tpu_operations.splash, q_BTNH, k_BGTH, v_BGTH, mask)

    def attend_tree(
        self,
        q_BTNH: jax.Array,
        new: Pair,
        cache: Pair,
        mask_BTS: jax.Array,
        start_B: jax.Array,
    ) -> tuple[jax.Array, Pair]:
        n_new = new[0].shape[2]
        if not (self.attention and kernel_takes(q_BTNH, cache[0], n_new)):
            return super().attend_tree(q_BTNH, new, cache, mask_BTS, start_B)
        cache = self.write_both(cache, new, start_B)
        end_B = start_B + n_new
        return tpu_operations.attend_tree(q_BTNH, *cache, mask_BTS, end_B), cache

    rotate = staticmethod(tpu_operations.rotate)

    def write_rows(
        self, cache_BGSH: jax.Array, rows_BGTH: jax.Array, start_B: jax.Array, axis: int = 2
    ) -> jax.Array:
        rows_BGTH = rows_BGTH.astype(cache_BGSH.dtype)
        return tpu_operations.write_rows(cache_BGSH, rows_BGTH, start_B, axis)

    def commit(self, cache: KVCache, length_B: jax.Array, path_BL: jax.Array) -> KVCache:
        moved: KVCache = jax.tree.map(
            lambda x: tpu_operations.move(x, length_B, path_BL), cache
        )
        return moved


def splash_takes(q_BTNH: jax.Array) -> bool:
    """Whether splash attention takes packed rows of this shape and type on the devices in sight."""
    _, T, _, H = q_BTNH.shape
    return T % 128 == 0 and H % 128 == 0 and takes_rows(q_BTNH)


def kernel_takes(q_BTNH: jax.Array, k_BGSH: jax.Array, n_new: int) -> bool:
    """Whether our kernel attends these queries to the keys of a cache, n of them new in each row."""
    mesh = jax.sharding.get_abstract_mesh()
    n_devices = jax.device_count() if mesh.empty else mesh.size
    if n_devices > 1 or not tpu_operations.fits(q_BTNH, k_BGSH):
        return False
    return n_new > 1 or q_BTNH.shape[0] * k_BGSH.shape[2] >= ONE_ROW_SLOTS
