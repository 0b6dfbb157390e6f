"""Tiny: parallel heads that also read the root, the token that the backbone chose after h_t.

x_k = h_t + SiLU(W_k [h_t ; e_{t+1}])        logits of token t + k + 2 = LM-Head_k(x_k)
"""

import jax
import jax.numpy as jnp

from medusa_jax.heads.drafter import DraftRequest, Params, Proposal, TextRows, shift_left
from medusa_jax.heads.layers import LastHidden, applied, lm_head_start
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.layers import Linear


class Tiny(LastHidden):
    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """W_k = 0: every head starts as its LM head."""
        D = self.llama.d_model
        head = {"layers_0": {"kernel": jnp.zeros((2 * D, D))}}
        head |= lm_head_start(self.heads, backbone)
        return {f"heads_{k}": head for k in range(self.n_heads)}

    def head_features(
        self, params: Params, backbone: Backbone, k: int, hidden: jax.Array, root: jax.Array
    ) -> jax.Array:
        """h_t [..., D] and the token after t [...] -> x_k [..., D]."""
        hidden = hidden.astype(backbone.llama.dtype)
        pair = jnp.concatenate([hidden, backbone.embed(root)], axis=-1)
        dtype, kernels = backbone.llama.dtype, backbone.kernels
        linear = Linear(self.llama.d_model, dtype=dtype, kernels=kernels)
        return hidden + jax.nn.silu(applied(linear, params[f"heads_{k}"]["layers_0"], pair))

    def features(self, params: Params, backbone: Backbone, rows: TextRows) -> jax.Array:
        hidden_BTD, root_BT = rows.hidden_BTE, shift_left(rows.tokens_BT, 1)
        heads = range(self.n_heads)
        return jnp.stack(
            [self.head_features(params, backbone, k, hidden_BTD, root_BT) for k in heads]
        )

    def propose(
        self, params: Params, backbone: Backbone, state: jax.Array, request: DraftRequest
    ) -> Proposal:
        heads, root_B = range(request.tree.depth), request.root_B
        features = [self.head_features(params, backbone, k, state, root_B) for k in heads]
        return self.fill(params, backbone, features, request)
