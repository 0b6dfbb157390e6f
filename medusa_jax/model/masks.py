"""The tokens that each new token sees, in the form that its path of attention takes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

# Up to this many tokens of a text (an accepted path) are scored against all slots of a cache at once, like the
# nodes of a tree; longer texts (prompts) only against the slots in use.
MAX_MASKED = 16


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
    """Visibility in `Kernels.layer`: the cached text and the path to the token itself.

    Attributes:
      mask_TR: [t, r] is True where row r after the text is on the path to new token t, itself included. The
        new tokens are the last T of the rows. Without rows (R = 0), the new tokens are a text.
      count_B: tokens of such a text; the rest is padding, whose results mean nothing. None: all.
      window: of these positions, only the last `window`; 0: all.
    """

    mask_TR: jax.Array
    count_B: jax.Array | None = None
    window: int = struct.field(pytree_node=False, default=0)


# A mask [B, T, S] over cache slots, the cached text and a path of new tokens, or the earlier text.
Mask = jax.Array | PathMask | CausalMask


def mask_after(
    T: int, slots: int, start_B: jax.Array, self_mask_TR: jax.Array | None, fused: bool
) -> Mask:
    """The mask of T tokens after a cached text, which see each other by `self_mask` (None: causally).

    Args:
      slots: slots of the cache.
      start_B: where the text ends.
      fused: a whole layer is one call (`Kernels.fuses`).
    """
    if self_mask_TR is None and T > MAX_MASKED:
        return CausalMask()
    if self_mask_TR is None:
        self_mask_TR = jnp.asarray(np.tri(T, dtype=bool))
    return PathMask(self_mask_TR) if fused else tree_mask(slots, start_B, self_mask_TR)


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
    tree_BTS = jnp.take(self_mask_TR, jnp.clip(offset_BS, 0, R - 1), axis=1)
    tree_BTS = jnp.moveaxis(tree_BTS, 0, 1) & inside_BS[:, None, :]
    return (offset_BS < 0)[:, None, :] | tree_BTS
