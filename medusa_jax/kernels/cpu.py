"""XLA's best forms on CPUs."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask
from medusa_jax.model.running_softmax import PartialAttention, blocks_part, rows_part

# Most parallel partial sums of `row_sum`; a power of two.
LANES = 512


@dataclass(frozen=True)
class CpuKernels(Kernels):
    """Small working sets, and sums in a fixed order. Attention of few tokens takes keys times queries, since
    otherwise XLA transposes all keys first."""

    keys_first: ClassVar[bool] = True
    # XLA's attention reads all slots.
    least_slots: ClassVar[int] = 128
    thresholds_at_once: ClassVar[int] = 1
    # Filters and noise of a large vocabulary take a fifth of a step with four nodes.
    path_only: ClassVar[bool] = True
    # Arithmetic outweighs reading the weights; larger pieces take memory: 100 MB for 256 tokens and 30 layers.
    prompt_piece: ClassVar[int] = 128
    largest_tree: ClassVar[int] = 16

    @property
    def calls_host(self) -> bool:
        from medusa_jax.native import asks  # only constrained text asks

        return asks()

    def text_part(
        self, q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> PartialAttention:
        """One row at a time, so that its scores fit the CPU's cache. On several devices a loop over rows
        would gather them all on each."""
        mesh = jax.sharding.get_abstract_mesh()
        one_device = mesh.empty or mesh.size == 1
        return (rows_part if one_device else blocks_part)(q_BGTRH, k_BGTH, v_BGTH, mask)

    def prompt_part(
        self, q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> PartialAttention:
        """By blocks of queries."""
        return blocks_part(q_BGTRH, k_BGTH, v_BGTH, mask)

    def row_sum(self, x: jax.Array) -> jax.Array:
        """Row sums in an order that does not depend on other rows.

        Lane i adds up entries i, i + lanes, ...; then halves are added until one lane is left. These are
        elementwise operations, which compilers do not reorder; the order of XLA's reductions depends on
        the shape of the whole array. (On accelerators products of other shapes round differently anyway.)
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return super().row_sum(x)
        V = x.shape[-1]
        lanes = min(LANES, 1 << (V - 1).bit_length())
        filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -V % lanes)])

        def add(i: jax.Array, sums: jax.Array) -> jax.Array:
            return sums + lax.dynamic_slice_in_dim(
                filled, i * lanes, lanes, axis=x.ndim - 1
            )

        first = filled[..., :lanes]
        sums = lax.fori_loop(1, filled.shape[-1] // lanes, add, first)
        while (half := sums.shape[-1] // 2) > 0:
            sums = sums[..., :half] + sums[..., half:]
        return sums
