"""The caches of drafters whose new tokens see more than a text, and their attention."""

import jax
import jax.numpy as jnp
from flax import struct

from medusa_jax.model.cache import Pair
from medusa_jax.model.grouped import flat, group_queries
from medusa_jax.model.kernels import Kernels
from medusa_jax.model.masks import CausalMask, Mask
from medusa_jax.model.running_softmax import PartialAttention, attend_part, merge_parts


class DraftCache(struct.PyTreeNode):
    """Base class of the caches that drafters pass instead of a text's keys and values, one per layer."""

    def attend(
        self, kernels: Kernels, q_BTNH: jax.Array, new: Pair, mask: Mask
    ) -> tuple[jax.Array, "DraftCache"]:
        """The output [B, T, N * H] of T new tokens, and the cache that the next call gets.

        Args:
          new: their keys and values, each [B, G, T, H].
        """
        raise NotImplementedError


LayerCache = Pair | DraftCache


class LevelCache(DraftCache):
    """What a later level of drafts sees in training (`heads/levels.py`).

    Attributes:
      text: keys and values [B, G, T, H] of the first level; row t sees rows up to t.
      levels: keys and values of the levels after the first; row t sees row t.
    """

    text: Pair
    levels: tuple[Pair, ...] = ()

    def attend(
        self, kernels: Kernels, q_BTNH: jax.Array, new: Pair, mask: Mask
    ) -> tuple[jax.Array, "LevelCache"]:
        """Row t sees the first level's rows up to t, row t of each later level, and itself."""
        assert isinstance(mask, CausalMask)
        levels = (*self.levels, new)
        q_BGTRH = group_queries(q_BTNH, new[0].shape[1])
        part = kernels.text_part(q_BGTRH, *self.text, mask)
        dtype = part.norm_BGTR1.dtype
        for level in levels:  # each query has one key per level: sums, not matrix products
            k, v = (x[:, :, :, None].astype(dtype) for x in level)
            score = (
                jnp.sum(q_BGTRH.astype(dtype) * k, -1, keepdims=True) * k.shape[-1] ** -0.5
            )
            part = merge_parts(part, PartialAttention(v, score))
        return flat(part.out_BGTRH.astype(q_BTNH.dtype)), self.replace(levels=levels)


class BlockCache(DraftCache):
    """The text that blocks of drafts see (`heads/dflash.py`).

    Attributes:
      text: keys and values [B, G, S, H] of the text.
      visible_BTS: the slots of the text that each token of the blocks sees.
      mask_KK: [k, i] is True where token k of a block sees its token i.
    """

    text: Pair
    visible_BTS: jax.Array
    mask_KK: jax.Array

    def attend(
        self, kernels: Kernels, q_BTNH: jax.Array, new: Pair, mask: Mask
    ) -> tuple[jax.Array, "BlockCache"]:
        """The T tokens are A blocks of K. Each block sees the text and itself; `mask` is not read."""
        q_BGTRH = group_queries(q_BTNH, new[0].shape[1])
        B, slots = len(q_BTNH), len(self.mask_KK)
        A = q_BTNH.shape[1] // slots

        def apart(x: jax.Array) -> jax.Array:
            """[B, G, T, ...] -> [B A, G, slots, ...]."""
            x = jnp.moveaxis(x.reshape(*x.shape[:2], A, slots, *x.shape[3:]), 2, 1)
            return x.reshape(B * A, *x.shape[2:])

        def together(x: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x.reshape(B, A, *x.shape[1:]), 1, 2)
            return x.reshape(*x.shape[:2], A * slots, *x.shape[4:])

        own = apart(q_BGTRH), apart(new[0]), apart(new[1])
        part = attend_part(*own, self.mask_KK[None])
        text_part = attend_part(q_BGTRH, *self.text, self.visible_BTS)
        part = merge_parts(jax.tree.map(together, part), text_part)
        return flat(part.out_BGTRH.astype(q_BTNH.dtype)), self
