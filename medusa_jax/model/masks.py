"""Masks: which tokens each new token sees."""

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
    """A token sees the cached text and the path to itself; see `Kernels.mask_of`.

    Attributes:
      mask_TR: [t, r] is True where row r after the text is on the path to new token t, itself included. The
        new tokens are the last T of the rows.
      window: of these positions, only the last `window`; 0: all.
    """

    mask_TR: jax.Array
    window: int = struct.field(pytree_node=False, default=0)


class TextMask(struct.PyTreeNode):
    """New tokens continue the text: each sees all earlier tokens and itself; see `Kernels.mask_of`.

    Attributes:
      count_B: new tokens of each row; the rest is padding, whose results mean nothing. None: all.
      window: as in `PathMask`.
    """

    count_B: jax.Array | None = None
    window: int = struct.field(pytree_node=False, default=0)


# What new tokens after a cached text see; `Kernels.layer` takes it as it is.
LayerMask = PathMask | TextMask
# A mask [B, T, S] over cache slots, one for `Kernels.layer`, or the earlier text.
Mask = jax.Array | LayerMask | CausalMask


def as_path(T: int) -> jax.Array | None:
    """A text of T tokens as a path of a tree [T, T], if it is short enough to be masked like one; else None."""
    return jnp.asarray(np.tri(T, dtype=bool)) if T <= MAX_MASKED else None


def tree_mask(
    slots: int,
    start_B: jax.Array,
    mask_TR: jax.Array,
    depth_T: jax.Array | None = None,
    window: int = 0,
) -> jax.Array:
    """The cache slots that new tokens see [B, T, S]: the text, and the slots of the R rows after it in the mask.

    Args:
      start_B: where the text ends.
      mask_TR: [t, r] is True where token t sees row r after the text.
      window: only the last `window` positions, 0: all; a token's position is `start` + depth, not its slot.
    """
    R = mask_TR.shape[1]
    offset_BS = jnp.arange(slots)[None, :] - start_B[:, None]
    text_BTS = (offset_BS < 0)[:, None, :]
    if window:
        assert depth_T is not None
        before_T = depth_T - window
        text_BTS &= offset_BS[:, None, :] > before_T[None, :, None]
        # Nodes of previous calls, a few positions back, count as the first of these.
        depth_R = jnp.pad(depth_T, (R - len(depth_T), 0), mode="edge")
        mask_TR = mask_TR & (depth_R[None, :] > before_T[:, None])
    # Column of each slot in `mask_TR`; other slots are clipped and masked.
    inside_BS = (offset_BS >= 0) & (offset_BS < R)
    tree_BTS = jnp.take(mask_TR, jnp.clip(offset_BS, 0, R - 1), axis=1)
    tree_BTS = jnp.moveaxis(tree_BTS, 0, 1) & inside_BS[:, None, :]
    return text_BTS | tree_BTS
