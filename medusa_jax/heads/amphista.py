"""Amphista (Li et al., NAACL 2025): heads that adapt the hidden state in stages and see each other.

    h^1_t = SAL^1(fc^1([h_t ; e_{t+1}]))    h^2_t = SAL^2(fc^2([h^1_t ; e_{t+1}]))        (1)
    h'_k = MLP_k(h^1_t) for the first half of the heads, MLP_k(h^2_t) for the second      (2)
    H_p = [h'_1 ... h'_K] + PE                                                          (3, 4)
    logits_k = LM-Head_k(Self-Attention(H_p)[k])                                        (5, 6)

The staged adaptation layers (SAL) are causal decoder layers with separate caches of accepted
positions; e_{t+1} embeds the root, the token that the backbone chose after h_t. The auto-embedding
block (3-5) attends among the K heads in both directions. Nothing depends on drafted tokens, so all
heads run at once.

Our choices where the paper gives no details: MLP_k is Medusa's residual block; a SAL has
the backbone's shape, followed by a norm; the attention is x + O(MHA(RMSNorm(x))) with the
backbone's number of attention heads and no feed-forward part ("layers of self-attention";
the paper's parameter count, "up to 45%" less at rank 64, leaves no room for a wide one,
though its figure 2 shows a Transformer encoder).
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.errors import between
from medusa_jax.heads.causal_layer import CausalLayer, LayerState
from medusa_jax.heads.drafter import (
    Committed,
    DraftRequest,
    Params,
    Proposal,
    TextRows,
    shift_left,
)
from medusa_jax.heads.layers import (
    SeparateHeads,
    applied,
    check_dropout,
    last_of,
    lm_head_start,
    res_block,
    res_block_start,
)
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import Pair
from medusa_jax.model.dropout import dropout
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import Linear, RMSNorm
from medusa_jax.model.masks import CausalMask, Mask
from medusa_jax.tree.tree import MOST_DEEP


@dataclass(unsafe_hash=True)
class AmphistaConfig(HeadsConfig):
    """Additional fields of Amphista heads, and how to set the ablations of the paper.

    Tables 4 and 5: `blocks=0` (w/o Auto-embedding), `position_encoding=False`, `stages=0` (w/o
    Staged-Adaptation), `stages=1` (One-Adaptation-Layer), `sampled_token=False`. Table 10:
    `stages` 1 to 4. Table 11: `lm_head="low_rank"` with `rank` 64 to 512.
    """

    drafter: str = "amphista"
    n_heads: int = 4
    # Staged adaptation layers; head k (1-based) of K reads stage ceil(k stages / K).
    stages: int = 2
    # Self-attention layers among the heads (Amphista-alpha: 2).
    blocks: int = 1
    position_encoding: bool = True
    # The stages also read the embedding of the token after each position.
    sampled_token: bool = True
    # A norm after every stage.
    stage_norm: bool = True
    # Eq. 5 as printed: no norm before the attention and no residual around it.
    plain_attention: bool = False
    # Width of the stages' MLP; 0 is the backbone's.
    stage_d_ff: int = 0
    # Dropout rate before the MLPs and before the LM heads.
    dropout: float = 0.0


class HeadAttention(nn.Module):
    """x + O(MHA(RMSNorm(x))) over the K heads of a position, unmasked; initially O = 0."""

    config: LlamaConfig
    dtype: DTypeLike
    plain: bool
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(self, x_BKD: jax.Array) -> jax.Array:
        c = self.config
        B, K, D = x_BKD.shape
        normed = x_BKD
        if not self.plain:
            norm = RMSNorm(c.rms_eps, self.dtype, self.kernels, name="norm")
            normed = norm(x_BKD)
        linear = partial(Linear, dtype=self.dtype, kernels=self.kernels)
        q_BKNH, k_BKNH, v_BKNH = (
            linear(c.n_heads * c.head_dim, name=name)(normed).reshape(
                B, K, c.n_heads, c.head_dim
            )
            for name in ("q_proj", "k_proj", "v_proj")
        )
        everyone = jnp.ones((B, K, K), bool)
        k_BNKH, v_BNKH = (x.transpose(0, 2, 1, 3) for x in (k_BKNH, v_BKNH))
        attended = self.kernels.attend(q_BKNH, k_BNKH, v_BNKH, everyone)
        out_BKD = linear(D, name="o_proj")(attended)
        return out_BKD if self.plain else x_BKD + out_BKD


@dataclasses.dataclass(frozen=True)
class Amphista(SeparateHeads):
    """K heads on staged adaptation layers, mixed by bidirectional attention."""

    heads: AmphistaConfig

    Config = AmphistaConfig
    separable = False

    def check(self) -> None:
        h = self.heads
        between("heads.stages", h.stages, 0, h.n_heads)
        between("heads.blocks", h.blocks, 0, MOST_DEEP)
        check_dropout(h.dropout)

    @property
    def _stage_shape(self) -> LlamaConfig:
        d_ff = self.heads.stage_d_ff or self.llama.d_ff
        return dataclasses.replace(self.llama, d_ff=d_ff)

    def stage_of(self, k: int) -> int:
        """The stage that head k (0-based) reads: with K = 4 and two stages 0, 0, 1, 1."""
        return max(-(-(k + 1) * self.heads.stages // self.n_heads) - 1, 0)

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """Every part starts as the identity, so each head starts (nearly) as the LM head."""
        h, D = self.heads, self.llama.d_model
        stage_keys, block_keys, pe_key = (
            jax.random.split(jax.random.fold_in(key, 0), max(h.stages, 1)),
            jax.random.split(jax.random.fold_in(key, 1), max(h.blocks, 1)),
            jax.random.fold_in(key, 2),
        )
        params: Params = {}
        for s in range(h.stages):
            stage = CausalLayer.start(
                stage_keys[s], self._stage_shape, backbone, h.stage_norm
            )
            if h.sampled_token:
                stage["fc"] = {"kernel": jnp.eye(2 * D, D)}  # [I ; 0]
            params[f"stages_{s}"] = stage
        for j in range(h.blocks):
            attention = HeadAttention(self.llama, jnp.float32, h.plain_attention)
            block = attention.init(block_keys[j], jnp.zeros((1, self.n_heads, D)))["params"]
            if not h.plain_attention:
                block["o_proj"] = jax.tree.map(jnp.zeros_like, block["o_proj"])
            params[f"blocks_{j}"] = block
        if h.blocks and h.position_encoding:
            encoding = 0.02 * jax.random.normal(pe_key, (self.n_heads, D))
            params["position_encoding"] = {"embedding": encoding}
        layers = {f"layers_{j}": res_block_start(D) for j in range(h.n_layers)}
        start = lm_head_start(h, backbone)
        return params | {f"heads_{k}": layers | start for k in range(self.n_heads)}

    def _stages(
        self,
        params: Params,
        backbone: Backbone,
        x_BTD: jax.Array,
        next_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        state: LayerState | None = None,
        only_B: jax.Array | None = None,
    ) -> tuple[list[jax.Array], list[Pair]]:
        """Equation 1: the output of every stage (without stages h_t), and its keys and values.

        Args:
          x_BTD, next_BTD: h_t and e_{t+1}.
          state: the accepted positions before, in decoding.
          only_B: the row of the last output that is needed; None: all.
        """
        h, dtype, kernels = self.heads, backbone.llama.dtype, backbone.kernels
        layer = CausalLayer(self._stage_shape, dtype, h.stage_norm, kernels)
        fc = Linear(self.llama.d_model, False, dtype, kernels=kernels)
        contexts: list[jax.Array] = []
        caches: list[Pair] = []
        for s in range(h.stages):
            stage = params[f"stages_{s}"]
            if h.sampled_token:
                pair_BTD = jnp.concatenate([x_BTD.astype(dtype), next_BTD], axis=-1)
                x_BTD = applied(fc, stage["fc"], pair_BTD)
            rows: list[Any] = [x_BTD, positions_BT, mask]
            if state is not None:
                # The next stage reads all rows.
                row_B = only_B if s == h.stages - 1 else None
                rows += [state.cache.layers[s], state.length_B, row_B]
            x_BTD, cache = applied(layer, stage, *rows)
            contexts.append(x_BTD)
            caches.append(cache)
        return contexts or [x_BTD], caches

    def mix(
        self,
        params: Params,
        backbone: Backbone,
        contexts: list[jax.Array],
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Equations 2 to 5: outputs of the stages, each [B, D] -> features of all heads [B, K, D]."""
        h, dtype = self.heads, backbone.llama.dtype
        rows = []
        for k in range(self.n_heads):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, k)
            x = dropout(contexts[self.stage_of(k)].astype(dtype), h.dropout, key)
            for j in range(h.n_layers):
                layer = params[f"heads_{k}"][f"layers_{j}"]
                x = res_block(layer, backbone, x)
            rows.append(x)
        x_BKD = jnp.stack(rows, axis=1)
        if h.blocks and h.position_encoding:
            encoding_KD = params["position_encoding"]["embedding"].astype(dtype)
            x_BKD = x_BKD + jnp.broadcast_to(encoding_KD, x_BKD.shape)
        block = HeadAttention(self.llama, dtype, h.plain_attention, backbone.kernels)
        for j in range(h.blocks):
            x_BKD = applied(block, params[f"blocks_{j}"], x_BKD)
        return dropout(x_BKD, h.dropout, dropout_key)

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        hidden_BTD, tokens_BT, positions_BT, segment_ids_BT, dropout_key = rows
        next_BTD = shift_left(backbone.embed(tokens_BT), 1)
        mask = CausalMask(segment_ids_BT)
        contexts, _ = self._stages(
            params, backbone, hidden_BTD, next_BTD, positions_BT, mask
        )
        B, T, D = hidden_BTD.shape
        flat = [x.reshape(B * T, D) for x in contexts]
        mixed = self.mix(params, backbone, flat, dropout_key)
        return jnp.moveaxis(mixed.reshape(B, T, self.n_heads, D), 2, 0)

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> LayerState:
        return LayerState.zeros(self.llama, self.heads.stages, batch, slots, dtype)

    def commit(
        self, params: Params, backbone: Backbone, state: LayerState, new: Committed
    ) -> LayerState:
        next_BTD = backbone.embed(new.next_tokens_BT)
        mask = state.text_mask(backbone.kernels, next_BTD.shape[1])
        given = (new.hidden_BTE, next_BTD, new.positions_BT, mask, state, last_of(new.n_B))
        contexts, caches = self._stages(params, backbone, *given)
        return state.extended(caches, contexts, new.n_B)

    def propose(
        self, params: Params, backbone: Backbone, state: LayerState, request: DraftRequest
    ) -> Proposal:
        """Run all heads, but only the LM heads that the tree's depth needs; the state includes the root."""
        contexts = [state.context_BSD[:, s] for s in range(state.context_BSD.shape[1])]
        x_BKD = self.mix(params, backbone, contexts)
        features = [x_BKD[:, k] for k in range(request.tree.depth)]
        return self.fill(params, backbone, features, request)


@dataclass(unsafe_hash=True)
class AmphistaAlphaConfig(AmphistaConfig):
    """Appendix A.2.4: two attention layers among the heads."""

    drafter: str = "amphista_alpha"
    blocks: int = 2


@dataclasses.dataclass(frozen=True)
class AmphistaAlpha(Amphista):
    """Amphista with a deeper auto-embedding block."""

    heads: AmphistaAlphaConfig

    Config = AmphistaAlphaConfig
