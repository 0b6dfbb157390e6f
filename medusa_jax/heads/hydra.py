"""Hydra heads (Ankner et al. 2024): each head also reads the tokens drafted before its own.

Head k (0-based) at position t guesses the token at t + k + 2 from

    x = [b_t ; E(x_{t+1}) ; ... ; E(x_{t+1+k})]                                (section 3, eq. 2)

where b_t is the backbone's hidden state and E its input embedding of the root and the path down to
the parent. A tree is therefore drafted level by level: each head runs once, on all nodes of its level
that have children.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import one_of
from medusa_jax.heads.drafter import DraftRequest, Params, Proposal, TextRows, shift_left
from medusa_jax.heads.fill import Level, fill_by_level
from medusa_jax.heads.layers import (
    LastHidden,
    applied,
    check_dropout,
    lm_head_start,
    res_block,
    res_block_start,
)
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.dropout import dropout
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import Linear
from medusa_jax.sharding import PyTree


@dataclass(unsafe_hash=True)
class HydraConfig(HeadsConfig):
    """Additional fields of Hydra heads."""

    drafter: str = "hydra"
    n_heads: int = 4
    # Layers 2..n of a head share one set of weights, as in the released checkpoints.
    tie_layers: bool = False
    # LM heads have a bias (a shared LM head has none).
    lm_bias: bool = True
    # Skip connection of a head's first layer, [(k + 2) D -> D]: a learned projection that starts as
    # b_t ("identity": a head starts as the LM head, as Medusa's does) or random ("random", the
    # authors' code); "fixed" is always b_t and has no weights.
    skip: str = "identity"
    # Dropout rate before every hidden layer and before the LM head.
    dropout: float = 0.0


class FirstBlock(nn.Module):
    """R x + r + SiLU(W x + c), [..., (k + 2) D] -> [..., D]; without R, x[..., :D] replaces R x + r."""

    features: int
    dtype: DTypeLike
    projected: bool
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        linear = partial(Linear, self.features, True, self.dtype, kernels=self.kernels)
        skip = x[..., : self.features]
        if self.projected:
            skip = linear(name="skip")(x)
        return skip + nn.silu(linear(name="linear")(x))


@dataclasses.dataclass(frozen=True)
class Hydra(LastHidden):
    """K sequentially dependent MLP heads; the state is the last accepted b_t [B, D]."""

    heads: HydraConfig

    Config = HydraConfig

    def check(self) -> None:
        one_of("heads.skip", self.heads.skip, ("identity", "random", "fixed"))
        check_dropout(self.heads.dropout)

    @property
    def stored_counts(self) -> tuple[int, int]:
        n = self.heads.n_layers
        return self.heads.n_heads, min(n, 2) if self.heads.tie_layers else n

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """All W = 0, LM heads from the backbone, R by `skip`."""
        D = self.llama.d_model
        start = lm_head_start(self.heads, backbone, self.heads.lm_bias)
        later_block = res_block_start(D)
        params = {}
        for k, head_key in enumerate(jax.random.split(key, self.n_heads)):
            probe = jnp.zeros((1, (k + 2) * D))
            first = self._first(jnp.float32).init(head_key, probe)["params"]
            first["linear"] = jax.tree.map(jnp.zeros_like, first["linear"])
            if self.heads.skip == "identity":
                first["skip"]["kernel"] = jnp.eye((k + 2) * D, D)
            later_layers = {
                f"layers_{j}": later_block for j in range(1, self.stored_counts[1])
            }
            params[f"heads_{k}"] = {"layers_0": first} | later_layers | start
        return params

    def _first(self, dtype: DTypeLike, kernels: Kernels = PLAIN) -> FirstBlock:
        projected = self.heads.skip != "fixed"
        return FirstBlock(self.llama.d_model, dtype, projected, kernels)

    def mlp(
        self,
        params: Params,
        backbone: Backbone,
        k: int,
        x: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Hidden layers of head k: [..., (k + 2) D] -> [..., D]."""
        head, rate = params[f"heads_{k}"], self.heads.dropout
        dtype = backbone.llama.dtype
        first = self._first(dtype, backbone.kernels)
        for j in range(self.heads.n_layers):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, j)
            layer = head[f"layers_{min(j, self.stored_counts[1] - 1)}"]
            x = dropout(x.astype(dtype), rate, key)
            x = res_block(layer, backbone, x) if j else applied(first, layer, x)
        return dropout(x, rate, dropout_key)

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        embedded_BTD, dtype = backbone.embed(rows.tokens_BT), backbone.llama.dtype
        x, out = rows.hidden_BTE.astype(dtype), []
        for k in range(self.n_heads):
            x = jnp.concatenate([x, shift_left(embedded_BTD, k + 1)], axis=-1)
            key = rows.dropout_key
            key = None if key is None else jax.random.fold_in(key, k)
            out.append(self.mlp(params, backbone, k, x, key))
        return jnp.stack(out)

    def context(self, state: PyTree) -> jax.Array:
        """b_t of the last accepted position [B, D]."""
        return state

    def propose(
        self, params: Params, backbone: Backbone, state: PyTree, request: DraftRequest
    ) -> Proposal:
        """Head d runs on the nodes of depth d that have children, and ranks these children."""
        dtype = backbone.llama.dtype

        def logits_of(
            k: int, level: Level, tokens_BP: jax.Array, x_BPW: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            rows = [x_BPW[:, level.rows_P], backbone.embed(tokens_BP)]
            x_BPW = jnp.concatenate(rows, axis=-1)
            features_BPD = self.mlp(params, backbone, k, x_BPW)
            return self.head_logits(params, backbone, k, features_BPD), x_BPW

        context_B1D = self.context(state).astype(dtype)[:, None, :]
        return fill_by_level(request, backbone, logits_of, context_B1D)
