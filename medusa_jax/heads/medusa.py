"""Medusa heads (Medusa 2.1.1): each guesses one later token, from the last hidden state only.

p^(k) = softmax(W2 (SiLU(W1 h + b) + h)), with any number of residual blocks before W2; with none, as the
authors' code also allows, a head is an LM head.
"""

import jax
import jax.numpy as jnp

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import DraftRequest, Params, Proposal, TextRows
from medusa_jax.heads.layers import LastHidden, lm_head_start, res_block, res_block_start
from medusa_jax.model.backbone import Backbone


class Medusa(LastHidden):
    """K independent heads on the last accepted hidden state, which is the whole state."""

    least_layers = 0

    def check(self) -> None:
        if self.heads.n_layers == 0 and self.heads.lm_head == "shared":
            raise UserError(
                "heads.n_layers 0 needs LM heads of their own: a head would have no parameters"
            )

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """W1 = 0 and W2 = the backbone's LM head: every head starts as the LM head."""
        start = lm_head_start(self.heads, backbone)
        block = res_block_start(self.llama.d_model)
        layers = {f"layers_{j}": block for j in range(self.heads.n_layers)}
        return {f"heads_{k}": layers | start for k in range(self.n_heads)}

    def head_features(
        self, params: Params, backbone: Backbone, k: int, hidden: jax.Array
    ) -> jax.Array:
        """[..., D] -> [..., D]."""
        x = hidden.astype(backbone.llama.dtype)
        for j in range(self.heads.n_layers):
            x = res_block(params[f"heads_{k}"][f"layers_{j}"], backbone, x)
        return x

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        hidden_BTE, heads = rows.hidden_BTE, range(self.n_heads)
        return jnp.stack(
            [self.head_features(params, backbone, k, hidden_BTE) for k in heads]
        )

    def propose(
        self, params: Params, backbone: Backbone, state: jax.Array, request: DraftRequest
    ) -> Proposal:
        features = [
            self.head_features(params, backbone, k, state)
            for k in range(request.tree.depth)
        ]
        return self.fill(params, backbone, features, request)
