"""Operations that differ by platform: one object, chosen once (`kernels/choose.py`) and given to `Llama`.

| new tokens of a row             | cache           | method                                                 |
|---------------------------------|-----------------|--------------------------------------------------------|
| packed texts, in training       | none            | `attend_text`                                          |
| a piece of a prompt             | the text before | `attend_prompt`, then the write, or `layer`            |
| one, a tree or a short path     | the text before | `attend_tree`; a whole `layer` if the kernels run it   |
| levels or blocks of drafts      | a `DraftCache`  | its `attend`                                           |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.model.cache import KVCache, Pair
from medusa_jax.model.grouped import attend, flat, group_queries
from medusa_jax.model.masks import (
    CausalMask,
    LayerMask,
    Mask,
    PathMask,
    TextMask,
    as_path,
    tree_mask,
)
from medusa_jax.model.product import at_least_f32, product
from medusa_jax.model.running_softmax import (
    PartialAttention,
    attend_cached,
    attend_part,
    blocks_part,
)
from medusa_jax.model.stored import Kernel, Storage, Stored
from medusa_jax.sharding import Params


@dataclass(frozen=True)
class Kernels:
    """The operations whose best form depends on the platform; here the plain forms, which run anywhere.

    A subclass overrides what is faster on its platform. Hashable: a static attribute of `Llama`, which the
    engine, drafters and acceptance rules read.

    Attributes:
      keys_first: attention of few tokens multiplies keys times queries. A GPU takes queries times keys: a
        softmax across rows of memory is three more kernels in each layer.
      least_slots: slots of the smallest cache. Compiling a further program for an accelerator takes longer
        than a smaller cache saves.
      thresholds_at_once: rounds of bisection whose thresholds are tested in one pass (`sampling`): a GPU
        launches five kernels per pass, for any number of rounds.
      path_only: sampled acceptance computes target tokens only down the accepted path. An accelerator
        computes all nodes at once faster than it starts a round.
      bitwise: a token's result is the same, bit for bit, with any number of other tokens.
      calls_host: a program on one device may call the host (`host_calls.py`).
      prompt_piece: most prompt tokens that a server reads at a time, between steps of other requests.
      largest_tree: nodes of the largest tree that a server chooses from.
    """

    keys_first: ClassVar[bool] = False
    least_slots: ClassVar[int] = 1024
    thresholds_at_once: ClassVar[int] = 5
    path_only: ClassVar[bool] = False
    bitwise: ClassVar[bool] = False
    prompt_piece: ClassVar[int] = 512
    largest_tree: ClassVar[int] = 64

    @property
    def calls_host(self) -> bool:
        return False

    # Attention.

    def attend_text(
        self, q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> jax.Array:
        """Attention within whole rows: [B, T, N * H]."""
        q_BGTRH = group_queries(q_BTNH, k_BGTH.shape[1])
        part = self.text_part(q_BGTRH, k_BGTH, v_BGTH, mask)
        return flat(part.out_BGTRH.astype(q_BTNH.dtype))

    def text_part(
        self, q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> PartialAttention:
        """Attention of whole rows over themselves, to be merged with other keys."""
        return blocks_part(q_BGTRH, k_BGTH, v_BGTH, mask)

    def attend_prompt(
        self, q_BTNH: jax.Array, new: Pair, cache: Pair, start_B: jax.Array, window: int
    ) -> jax.Array:
        """Attention of consecutive tokens over themselves and a cached text: `running_softmax.attend_cached`.

        Args:
          new: keys and values of the tokens, each [B, G, T, H], not written yet.
        """
        q_BGTRH = group_queries(q_BTNH, cache[0].shape[1])
        part = self.prompt_part(q_BGTRH, *new, CausalMask(window=window))
        return attend_cached(q_BGTRH, part, cache, start_B, window)

    def prompt_part(
        self, q_BGTRH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask: CausalMask
    ) -> PartialAttention:
        """Attention of a piece of a prompt over itself, all at once: loops over blocks cost more."""
        T = q_BGTRH.shape[2]
        return attend_part(q_BGTRH, k_BGTH, v_BGTH, mask.visible(0, T, 0, T))

    def attend_tree(
        self,
        q_BTNH: jax.Array,
        new: Pair,
        cache: Pair,
        mask_BTS: jax.Array,
        start_B: jax.Array,
    ) -> tuple[jax.Array, Pair]:
        """Attention of few tokens over all slots of a cache, and the cache with their keys and values.

        One token attends before the write, several attend after it.
        """
        if new[0].shape[2] == 1:
            out_BTD = attend(q_BTNH, *cache, mask_BTS, new, start_B, self.keys_first)
            return out_BTD, self.write_after(cache, new, start_B, out_BTD)
        cache = self.write_both(cache, new, start_B)
        return self.attend(q_BTNH, *cache, mask_BTS), cache

    def attend(
        self, q_BTNH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, mask_BTS: jax.Array
    ) -> jax.Array:
        """Attention of T queries over S slots, as `grouped.attend`: [B, T, N * H]."""
        return attend(q_BTNH, k_BGSH, v_BGSH, mask_BTS, keys_first=self.keys_first)

    def mask_of(
        self,
        seen: LayerMask,
        cache: KVCache,
        start_B: jax.Array,
        depth_T: jax.Array | None = None,
    ) -> Mask:
        """What new tokens after a cached text see, in the form that these kernels' attention takes.

        Args:
          start_B, depth_T: as for `masks.tree_mask`; a text and a window need `depth_T`.
        """
        if isinstance(seen, TextMask):
            assert depth_T is not None
            path_TT = as_path(len(depth_T))
            if path_TT is None:
                return CausalMask(window=seen.window)
            seen = PathMask(path_TT, seen.window)
        return tree_mask(cache.slots, start_B, seen.mask_TR, depth_T, seen.window)

    # A whole layer.

    def runs_layers(self, head_dim: int) -> bool:
        """Whether `layer` runs layers over few tokens, with heads of this size."""
        return False

    def layer(
        self,
        config: LlamaConfig,
        params: Mapping[str, Any],
        x_BTD: jax.Array,
        rope: Pair,
        mask: LayerMask,
        cache: Pair,
        start_B: jax.Array,
        input_BTI: jax.Array | None = None,
    ) -> tuple[jax.Array, Pair]:
        """Apply `layers.DecoderLayer` to few tokens after a cached text, in one call.

        Args:
          input_BTI: what attention reads; None: the norm of x.
        """
        raise NotImplementedError

    # Single operations.

    def norm(
        self, x: jax.Array, scale_D: jax.Array, eps: float, dtype: DTypeLike
    ) -> jax.Array:
        """x [..., D] / rms(x) * scale, the mean square in float32 or wider."""
        x_f32 = x.astype(at_least_f32(dtype))
        x_f32 = x_f32 * lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
        return jnp.broadcast_to(scale_D.astype(dtype), x.shape) * x_f32.astype(dtype)

    def rotate(
        self, x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array
    ) -> jax.Array:
        """Rotary position embedding; plane i pairs components i and i + H/2."""
        first, second = jnp.split(x_BTNH, 2, axis=-1)
        swapped = jnp.concatenate([-second, first], axis=-1)
        wide = cos_BT1H.dtype
        rotated = x_BTNH.astype(wide) * cos_BT1H + swapped.astype(wide) * sin_BT1H
        return rotated.astype(x_BTNH.dtype)

    def product(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """x [..., in] times kernel [in, ...], summed in float32 or wider."""
        return product(x, kernel)

    def multiply(self, x: jax.Array, kernel: Kernel, dtype: DTypeLike) -> jax.Array:
        """x [..., inputs] times a kernel in any form, computed in `dtype`, summed in float32 or wider."""
        x = x.astype(dtype)
        if isinstance(kernel, Stored):
            return kernel.product(x, self.product)
        return self.product(x, kernel.astype(dtype))

    # The cache.

    def write_rows(
        self, cache_BGSH: jax.Array, rows_BGTH: jax.Array, start_B: jax.Array, axis: int = 2
    ) -> jax.Array:
        """Write T consecutive slots per row, row b from slot `start_B[b]`.

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

    def write_both(self, cache: Pair, new: Pair, start_B: jax.Array) -> Pair:
        """Write keys and values of new tokens to their slots."""
        keys_BGSH = self.write_rows(cache[0], new[0], start_B)
        return keys_BGSH, self.write_rows(cache[1], new[1], start_B)

    def write_after(
        self, cache: Pair, new: Pair, start_B: jax.Array, readers_BTD: jax.Array
    ) -> Pair:
        """`write_both`, ordered after the reads from the same cache.

        If the write follows the reads, the cache changes in place instead of being copied whole; XLA
        keeps this order only if the new values depend on the values read.
        """
        zero_B111 = (readers_BTD[:, 0, 0] * 0).astype(new[0].dtype)[:, None, None, None]
        new = new[0] + zero_B111, new[1] + zero_B111
        return self.write_both(cache, new, start_B)

    @jax.named_scope("cache")
    def commit(self, cache: KVCache, length_B: jax.Array, path_BL: jax.Array) -> KVCache:
        """Move the accepted candidates to the end of the committed text.

        Row b's slot `length + path[b, i]` is copied to slot `length + i`. A path begins with 0, the
        root, and ascends to the last accepted node. Later entries may be any of the M candidates: their
        copies land after the new length, where the next step writes.

        Example: length 10, four candidates in slots 10..13, path [0, 2, 3]: slots 10, 11, 12
        get the rows of 10, 12, 13, and the caller's new length is 13 (two drafts
        accepted after the root) or less.
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
        leaves, structure = jax.tree.flatten(cache)
        rows = lax.optimization_barrier(jnp.stack([accepted(x) for x in leaves]))
        moved = [self.write_rows(x, new, length_B) for x, new in zip(leaves, rows)]
        return jax.tree.unflatten(structure, moved)

    # Choices among scores.

    def top_k(self, scores_RO: jax.Array, n: int) -> jax.Array:
        """Columns of the n largest scores of each row [R, n]; ties go to the lower column."""
        return lax.top_k(scores_RO, n)[1]

    def best_token(self, scores: jax.Array) -> jax.Array:
        """Index of the largest entry of the last axis, the first among equals (int32).

        V, which is no index, if there is none: an entry is NaN, or all are minus infinity.

        XLA's argmax reduces index and value together, which is not vectorised on CPUs and takes as long as
        a layer of the demo model. Two plain reductions are.
        """
        V = scores.shape[-1]
        # A maximum of XLA's on a CPU may leave out NaN.
        top = jnp.max(jnp.where(jnp.isnan(scores), jnp.inf, scores), axis=-1, keepdims=True)
        index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
        is_best = (scores == top) & (top > -jnp.inf)
        return jnp.min(jnp.where(is_best, index, V), axis=-1)

    def row_sum(self, x: jax.Array) -> jax.Array:
        """The sum over the last axis [..., 1]."""
        return jnp.sum(x, axis=-1, keepdims=True)

    # The form of stored kernels.

    @property
    def panel(self) -> int:
        """Outputs of a panel of floats (`Storage.panel`); 0: kernels are stored plainly."""
        return 0

    @property
    def mark(self) -> str | None:
        """Names compiled kernels of our own in measurements; None: there are none."""
        return None

    def panels(
        self, kernel_IO: jax.Array, scales_O: jax.Array | None, storage: Storage
    ) -> Stored:
        """A kernel of floats, or of int8 with a scale for each output, in panels of `storage`."""
        raise NotImplementedError

    def read_blocks(
        self,
        config: LlamaConfig,
        name: str,
        blocks: Params,
        others: Params,
        activations: int,
    ) -> Params:
        """Convert an entry of the backbone that comes in the blocks of a GGUF file (`model/blocks.py`).

        Only kernels with panels can.

        Args:
          name: of the entry, such as "layers_3".
          blocks: its `Blocks`.
          others: its other parameters, in decoding form.
          activations: as in `Storage`.
        """
        raise NotImplementedError


PLAIN = Kernels()
