"""Drafters whose layers feed on their own outputs, such as EAGLE's: one set of layers for all depths.

    a'_t = Layers(a_t, e_{t+1})        logits of token t + 2 = LM-Head(a'_t)

For accepted positions a is computed from the backbone's hidden state; for drafted ones it
is the parent's a'. e embeds the next token. The layers cache keys and values of accepted
positions; each node of the tree attends to them and to its path.

In training (`train.levels`), level k of row t is at position t + k and reads level k - 1 of row t and the
true token at t + k + 1. It attends to level 0 of rows up to t and to levels 1 to k of row t.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.causal_layer import LayerState
from medusa_jax.heads.drafter import (
    Committed,
    Drafter,
    DraftRequest,
    Params,
    Proposal,
    TextRows,
    shift_left,
)
from medusa_jax.heads.fill import Level, fill_by_level
from medusa_jax.heads.layers import last_of, lm_head_logits, lm_head_start
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.draft_caches import LayerCache, LevelCache
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import zero_output
from medusa_jax.model.masks import CausalMask, Mask
from medusa_jax.model.rope import rope_tables
from medusa_jax.sharding import PyTree


class Stack(nn.Module):
    """Decoder layers in a row; a subclass creates `layers` and defines the input of the first."""

    config: LlamaConfig
    dtype: DTypeLike
    kernels: Kernels

    def first(self, x_BTD: jax.Array, next_BTD: jax.Array) -> PyTree:
        """The input of the first layer, from a and e."""
        raise NotImplementedError

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """a' from the output of the last layer."""
        return x_BTD

    def __call__(
        self,
        x_BTD: jax.Array,
        next_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        cache: tuple[LayerCache, ...] | None = None,
        start_B: jax.Array | None = None,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """a and e -> a', and the keys and values of every layer; `only_B` as in `Attention`."""
        rope = rope_tables(self.config, positions_BT, self.dtype)
        x = self.first(x_BTD.astype(self.dtype), next_BTD.astype(self.dtype))
        caches, n = [], len(self.layers)
        for j, (layer, old) in enumerate(zip(self.layers, cache or [None] * n)):
            row_B = only_B if j == n - 1 else None
            x, new = layer(x, rope, mask, old, start_B, row_B)
            caches.append(new)
        return self.last(x), tuple(caches)


@dataclasses.dataclass(frozen=True)
class LevelDrafter(Drafter):
    """One set of layers for all depths, under "heads_0"; the state is their cache."""

    @property
    def stored_counts(self) -> tuple[int, int]:
        return 1, self.heads.n_layers

    def with_levels(self, levels: int) -> Drafter:
        if not 1 <= levels <= self.n_heads:
            raise UserError(
                f"train.levels is from 1 to heads.n_heads {self.n_heads}, not {levels}"
            )
        heads = dataclasses.replace(self.heads, n_heads=levels)
        return dataclasses.replace(self, heads=heads)

    @property
    def shape(self) -> LlamaConfig:
        return self.llama

    def layers(self, dtype: DTypeLike, kernels: Kernels = PLAIN) -> Stack:
        raise NotImplementedError

    def run(
        self, params: Params, backbone: Backbone, *args: PyTree, **options: Any
    ) -> PyTree:
        module = self.layers(backbone.llama.dtype, backbone.kernels)
        return module.apply({"params": params["heads_0"]}, *args, **options)

    def first_input(
        self, params: Params, backbone: Backbone, hidden_BTE: jax.Array
    ) -> jax.Array:
        """Input of the first level at accepted positions [B, T, D]."""
        return hidden_BTE

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        return lm_head_logits(self.heads, params["heads_0"], backbone, features)

    def start_as_identity(self, layers: Params, backbone: Backbone) -> Params:
        """Head parameters whose layers add zero to their input and whose LM head is the backbone's."""
        stack = (f"layers_{j}" for j in range(self.heads.n_layers))
        identity = {name: zero_output(layers[name]) for name in stack}
        return {"heads_0": layers | identity | lm_head_start(self.heads, backbone)}

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        """Level k of row t is at position t + k and sees true rows up to t and levels 1 to k."""
        hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = rows
        embedded_BTD = backbone.embed(tokens_BT)
        mask = CausalMask(segment_ids_BT)

        def level(k: int, x_BTD: jax.Array, caches: PyTree) -> PyTree:
            next_BTD = shift_left(embedded_BTD, k + 1)
            return self.run(
                params, backbone, x_BTD, next_BTD, positions_BT + k, mask, caches
            )

        input_BTD = self.first_input(params, backbone, hidden_BTE)
        feature_BTD, text = level(0, input_BTD, None)
        features, caches = [feature_BTD], tuple(LevelCache(pair) for pair in text)
        for k in range(1, self.n_heads):
            # The backward pass keeps one level's activations at a time.
            remat_level = jax.checkpoint(partial(level, k))
            feature_BTD, caches = remat_level(feature_BTD, caches)
            features.append(feature_BTD)
        return jnp.stack(features)

    def queries_keys(
        self, params: Params, backbone: Backbone, rows: TextRows
    ) -> tuple[jax.Array, jax.Array]:
        """Rotated queries [B, T, N, H] and keys [B, G, T, H] of the first layer, for `train.induction_weight`.

        Row t matches `features`: it reads tokens up to t + 1.
        """
        hidden_BTE, tokens_BT, positions_BT, segment_ids_BT, _ = rows
        shape, dtype = self.shape, backbone.llama.dtype
        name = "q_norm" if shape.qk_norm else "q_proj"
        next_BTD = shift_left(backbone.embed(tokens_BT), 1)
        input_BTD = self.first_input(params, backbone, hidden_BTE)
        mask = CausalMask(segment_ids_BT)
        (_, text), captured = self.run(
            params, backbone, input_BTD, next_BTD, positions_BT, mask,
            capture_intermediates=lambda module, _: module.name == name,
            mutable=["intermediates"],
        )  # fmt: skip
        (q,) = captured["intermediates"]["layers_0"]["self_attn"][name]["__call__"]
        q_BTNH = q.reshape(*tokens_BT.shape, shape.n_heads, shape.head_dim)
        k_BGTH, _ = text[0]
        rope = rope_tables(shape, positions_BT, dtype)
        return backbone.kernels.rotate(q_BTNH, *rope), k_BGTH

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> LayerState:
        state = LayerState.zeros(self.shape, self.heads.n_layers, batch, slots, dtype)
        return state.replace(context_BSD=state.context_BSD[:, :1])  # the last layer's only

    def commit(
        self, params: Params, backbone: Backbone, state: LayerState, new: Committed
    ) -> LayerState:
        next_BTD = backbone.embed(new.next_tokens_BT)
        mask = state.text_mask(backbone.kernels, next_BTD.shape[1])
        input_BTD = self.first_input(params, backbone, new.hidden_BTE)
        rows = (input_BTD, next_BTD, new.positions_BT, mask)
        last_B1D, layers = self.run(
            params, backbone, *rows, state.cache.layers, state.length_B, last_of(new.n_B)
        )
        return state.extended(list(layers), [last_B1D], new.n_B)

    def propose(
        self, params: Params, backbone: Backbone, state: LayerState, request: DraftRequest
    ) -> Proposal:
        """Draft level by level: run nodes with children after the text; the state has the root's row."""

        def logits_of(
            depth: int, level: Level, tokens_BP: jax.Array, carry: PyTree
        ) -> tuple[jax.Array, PyTree]:
            features_BPD, cache = carry
            if depth:
                mask_PR = jnp.asarray(level.mask_PR[:, 1:])  # without the root
                P, R = mask_PR.shape
                start_B = state.length_B
                mask = state.path_mask(backbone.kernels, mask_PR)
                positions_BP = jnp.tile(start_B[:, None] + depth - 1, (1, P))
                features_BPD, cache = self.run(
                    params, backbone, features_BPD[:, level.rows_P],
                    backbone.embed(tokens_BP), positions_BP, mask, cache, start_B + R - P,
                )  # fmt: skip
            logits = self.head_logits(params, backbone, depth, features_BPD)
            return logits, (features_BPD, cache)

        root = (state.context_BSD, state.cache.layers)
        return fill_by_level(request, backbone, logits_of, root)
