"""Drafters whose layers continue their own outputs, such as EAGLE's: one set of layers for all depths.

    a'_t = Layers(a_t, e_{t+1})        logits of token t + 2 = LM-Head(a'_t)

a is made from the backbone's hidden state for accepted positions and is the parent's a' for drafted
ones; e embeds the token after it. The layers' keys and values of accepted positions are cached, and
each level of the tree runs after them, each node seeing its path.

In training (`train.levels`) level k of row t reads level k - 1 of row t and the true token at t + k + 1,
at position t + k. It sees the first level of rows up to t and levels 1 to k of row t.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.config import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import (
    Backbone,
    Committed,
    Drafter,
    DraftRequest,
    Params,
    TextRows,
)
from medusa_jax.heads.layers import LayerState, shift_left
from medusa_jax.heads.levels import Level, fill_by_level, inner_nodes
from medusa_jax.model.attention import cached_mask
from medusa_jax.model.causal import CausalMask
from medusa_jax.sharding import PyTree

# Teacher-forced positions per chunk of deeper levels; limits the memory of their attention scores.
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Autoregressive(Drafter):
    """One set of layers for all depths, under "heads_0"; the state is their cache."""

    @property
    def stored_counts(self) -> tuple[int, int]:
        return 1, self.heads.n_layers

    def loss_view(self, levels: int = 1) -> Drafter:
        if not 1 <= levels <= self.n_heads:
            raise UserError(
                f"train.levels is from 1 to heads.n_heads {self.n_heads}, not {levels}"
            )
        heads = dataclasses.replace(self.heads, n_heads=levels)
        return dataclasses.replace(self, heads=heads)

    @property
    def shape(self) -> LlamaConfig:
        """The shape of the layers."""
        return self.llama

    def layers(self, dtype: DTypeLike) -> nn.Module:
        """The module: (a, e, positions, mask, cache, start) -> a' [B, T, D], keys and values by layer."""
        raise NotImplementedError

    def _run(
        self, params: Params, backbone: Backbone, *args: PyTree, method: str = "__call__"
    ) -> PyTree:
        module = self.layers(backbone.llama.dtype)
        return module.apply({"params": params["heads_0"]}, *args, method=method)

    def _first_input(
        self, params: Params, backbone: Backbone, hidden_BTE: jax.Array
    ) -> jax.Array:
        """What the first level reads of accepted positions [B, T, D]."""
        return hidden_BTE

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        """Level k of row t is at position t + k and sees true rows up to t and levels 1 to k."""
        hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = rows
        ahead = [
            shift_left(backbone.embed(tokens_BT), k + 1).astype(backbone.llama.dtype)
            for k in range(self.n_heads)
        ]
        mask = CausalMask(segment_ids_BT)
        read_BTD = self._first_input(params, backbone, hidden_BTE)
        first_BTD, text = self._run(
            params, backbone, read_BTD, ahead[0], positions_BT, mask
        )
        if self.n_heads == 1:
            return first_BTD[None]
        (B, T), K = tokens_BT.shape, self.n_heads
        size = min(CHUNK, T)
        # After the text, room for one chunk's rows of each level.
        text = jax.tree.map(lambda x: padded(x, 2, size * (K - 1)), text)
        whole = (first_BTD, positions_BT, segment_ids_BT, *ahead[1:])
        first_BTD, positions_BT, segment_ids_BT, *ahead = (
            padded(x, 1, -T % size) for x in whole
        )
        row_C, slot_R = np.arange(size), np.arange(size * (K - 1))
        own_CR = row_C[:, None] == slot_R[None, :] % size

        def deeper(begin: jax.Array) -> jax.Array:
            """Levels 1 to K - 1 of the rows [begin, begin + size)."""

            def here(x: jax.Array, axis: int = 1) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, begin, size, axis=axis)

            seen_BCT = CausalMask(segment_ids_BT).visible(begin, size, 0, T)

            def level(carry: PyTree, inputs: PyTree) -> tuple[PyTree, jax.Array]:
                (features_BCD, cache), (k, next_BCD) = carry, inputs
                so_far_CR = own_CR & (slot_R < k * size)[None, :]
                own_BCR = jnp.broadcast_to(so_far_CR, (B, *own_CR.shape))
                deeper_BCD, cache = self._run(
                    params, backbone, features_BCD, next_BCD, here(positions_BT) + k,
                    jnp.concatenate([seen_BCT, own_BCR], axis=-1),
                    cache, jnp.broadcast_to(T + (k - 1) * size, (B,)),
                )  # fmt: skip
                return (deeper_BCD, cache), deeper_BCD

            levels = (jnp.arange(1, K), here(jnp.stack(ahead), axis=2))
            return lax.scan(level, (here(first_BTD), text), levels)[1]

        # The backward pass recomputes each chunk: storing the scores of all would take too much
        # memory. Inside a loop common subexpressions need no barrier.
        once_more = jax.checkpoint(deeper, prevent_cse=False)
        deep = lax.map(once_more, jnp.arange(0, first_BTD.shape[1], size))
        deep_KBTD = jnp.moveaxis(deep, 0, 2).reshape(K - 1, *first_BTD.shape)
        return jnp.concatenate([first_BTD[None], deep_KBTD])[:, :, :T]

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> LayerState:
        state = LayerState.zeros(self.shape, self.heads.n_layers, batch, slots, dtype)
        return state.replace(context_BSD=state.context_BSD[:, :1])  # the last layer's alone

    def commit(
        self, params: Params, backbone: Backbone, state: LayerState, new: Committed
    ) -> LayerState:
        next_BTD = backbone.embed(new.next_tokens_BT)
        mask = cached_mask(next_BTD.shape[1], state.cache.slots, state.length_B)
        read_BTD = self._first_input(params, backbone, new.hidden_BTE)
        rows = (read_BTD, next_BTD, new.positions_BT, mask)
        features_BTD, layers = self._run(
            params, backbone, *rows, state.cache.layers, state.length_B
        )
        return state.extended(list(layers), [features_BTD], new.n_B)

    def propose(
        self, params: Params, backbone: Backbone, state: LayerState, request: DraftRequest
    ) -> jax.Array:
        """Draft level by level: run nodes with children after the text; the state has the root's row."""
        tree = request.tree
        inner = inner_nodes(Level.of(tree), tree)

        def logits_of(
            depth: int, level: Level, tokens_BP: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            features_BPD, cache, done = carry
            if depth:
                done = np.concatenate([done, inner[depth]])
                mask_PR = jnp.asarray(tree.mask_MM[inner[depth]][:, done])
                P, R = mask_PR.shape
                start_B = state.length_B
                mask = cached_mask(P, state.cache.slots, start_B, mask_PR)
                positions_BP = jnp.tile(start_B[:, None] + depth - 1, (1, P))
                features_BPD, cache = self._run(
                    params, backbone, features_BPD[:, level.rows_P],
                    backbone.embed(tokens_BP), positions_BP, mask, cache, start_B + R - P,
                )  # fmt: skip
            logits = self.head_logits(params, backbone, depth, features_BPD)
            return logits, (features_BPD, cache, done)

        root = (state.context_BSD, state.cache.layers, np.zeros(0, int))
        return fill_by_level(request, backbone, logits_of, root)


def padded(x: jax.Array, axis: int, more: int) -> jax.Array:
    """x with `more` zeros appended along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths)
