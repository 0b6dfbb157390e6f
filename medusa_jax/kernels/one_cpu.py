"""The native kernels for one CPU device (`cpu/`): products in panels, and whole layers in one call.

XLA for CPU reads kernels below memory speed and rounds by the number of rows. The products are
`Panels.product`.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from medusa_jax import native
from medusa_jax.cpu import blocks
from medusa_jax.cpu import layer as calls
from medusa_jax.cpu import panels as forms
from medusa_jax.kernels.cpu import CpuKernels
from medusa_jax.model.cache import KVCache
from medusa_jax.model.masks import LayerMask, Mask


def native_kernels(dtype: np.dtype, head_dim: int) -> "PanelKernels | None":
    """The native kernels for a model that computes in this type; None if they cannot or must not run.

    Raises:
      UserError: MEDUSA_JAX_PRODUCTS is unknown or cannot be followed.
    """
    if not native.usable(dtype):
        return None
    layers = dtype == jnp.float32 and head_dim > 0 and native.attends(head_dim)
    return LayerKernels() if layers else PanelKernels()


@dataclass(frozen=True)
class PanelKernels(CpuKernels):
    """Kernels in panels, whose products are native; norms, rotations and attention are XLA's."""

    @property
    def panel(self) -> int:
        return native.loaded().panel

    @property
    def mark(self) -> str:
        return native.loaded().mark

    panels = staticmethod(forms.panels)
    read_blocks = staticmethod(blocks.read_blocks)

    def best_token(self, scores: jax.Array) -> jax.Array:
        if scores.dtype != jnp.float32:
            return super().best_token(scores)
        return calls.best_token(scores)


@dataclass(frozen=True)
class LayerKernels(PanelKernels):
    """Native layers of few tokens, norms and rotations, too: in float32, rounded alike in every program."""

    # The native attention reads only the text.
    least_slots: ClassVar[int] = 512
    bitwise: ClassVar[bool] = True

    def runs_layers(self, head_dim: int) -> bool:
        return native.attends(head_dim)

    def mask_of(
        self,
        seen: LayerMask,
        cache: KVCache,
        start_B: jax.Array,
        depth_T: jax.Array | None = None,
    ) -> Mask:
        if self.runs_layers(cache.head_dim):
            return seen
        return super().mask_of(seen, cache, start_B, depth_T)

    layer = staticmethod(calls.layer)
    rotate = staticmethod(calls.rotate)

    def norm(
        self, x: jax.Array, scale_D: jax.Array, eps: float, dtype: DTypeLike
    ) -> jax.Array:
        return calls.norm(x, scale_D, eps)

    def commit(self, cache: KVCache, length_B: jax.Array, path_BL: jax.Array) -> KVCache:
        leaves, structure = jax.tree.flatten(cache)
        moved = calls.commit(leaves, length_B, path_BL)
        return jax.tree.unflatten(structure, moved)
