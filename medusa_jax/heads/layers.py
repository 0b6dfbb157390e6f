"""Building blocks of drafters: residual blocks, LM heads, the last hidden state."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig
from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Committed, Drafter, DraftRequest, Params, Proposal
from medusa_jax.heads.fill import fill_by_rank
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.layers import Linear, row_of
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import PyTree


def applied(module: nn.Module, params: Params, *args: Any) -> Any:
    """The output of a module with these parameters."""
    return module.apply({"params": params}, *args)


def res_block(params: Params, backbone: Backbone, x: jax.Array) -> jax.Array:
    """x + SiLU(x W + b), [..., D] -> [..., D]."""
    dtype, kernels = backbone.llama.dtype, backbone.kernels
    linear = Linear(x.shape[-1], True, dtype, kernels=kernels)
    return x + nn.silu(applied(linear, params, x))


def res_block_start(D: int) -> Params:
    """W = 0 and b = 0: the identity."""
    return {"kernel": jnp.zeros((D, D)), "bias": jnp.zeros((D,))}


def last_of(n_B: jax.Array) -> jax.Array:
    """The last of n rows, 0-based; row 0 where n = 0."""
    return jnp.maximum(n_B - 1, 0)


def take_last(rows_BTD: jax.Array, n_B: jax.Array, old_BD: jax.Array) -> jax.Array:
    """The n-th of each batch row's T vectors, or the only one; the row of `old_BD` where n = 0."""
    last_BD = row_of(rows_BTD, last_of(n_B))[:, 0]
    return jnp.where((n_B > 0)[:, None], last_BD.astype(old_BD.dtype), old_BD)


# LM heads of draft heads (`HeadsConfig.lm_head`).


def lm_head_start(heads: HeadsConfig, backbone: Backbone, bias: bool = False) -> Params:
    """Initial parameters of one LM head: {} if it is shared with the backbone.

    "own" is a copy of the backbone's, "low_rank" its best approximation of that rank (truncated SVD,
    the singular values split evenly between the two factors). With a draft vocabulary, pass a
    backbone whose LM head has only its columns.
    """
    if heads.lm_head == "shared":
        return {}
    if backbone.llama.config.tie_embeddings:
        lm_head_DV = backbone.params["embed_tokens"]["embedding"].T.astype(jnp.float32)
    else:
        lm_head_DV = backbone.params["lm_head"]["kernel"].astype(jnp.float32)
    if (divisor := backbone.llama.config.logit_divisor) != 1:
        lm_head_DV = lm_head_DV / divisor
    if heads.lm_head == "own":
        start = {"kernel": lm_head_DV}
    else:
        u, s, v = jnp.linalg.svd(lm_head_DV, full_matrices=False)
        root = jnp.sqrt(s[: heads.rank])
        basis = u[:, : heads.rank] * jnp.broadcast_to(root, (u.shape[0], root.size))
        start = {"down": basis, "up": root[:, None] * v[: heads.rank]}
    if bias:
        start["bias"] = jnp.zeros((lm_head_DV.shape[1],))
    return {"lm_head": start}


def lm_head_logits(
    heads: HeadsConfig, head_params: Params, backbone: Backbone, features: jax.Array
) -> jax.Array:
    """Features [..., D] -> logits [..., O] of one head, float32 or wider.

    Args:
      head_params: the parameters of the head, with its LM head (unless shared) under "lm_head".
    """
    if heads.lm_head == "shared":
        return backbone.lm_head(features)
    lm_head, dtype = head_params["lm_head"], backbone.llama.dtype
    wide = at_least_f32(dtype)
    if heads.lm_head == "own":
        outputs = heads.draft_vocab or backbone.llama.config.vocab_size
        linear = Linear(outputs, "bias" in lm_head, dtype, kernels=backbone.kernels)
        return applied(linear, lm_head, features).astype(wide)

    multiply = backbone.kernels.multiply
    low_rank = multiply(features, lm_head["down"], dtype).astype(dtype)
    logits = multiply(low_rank, lm_head["up"], dtype)
    if "bias" in lm_head:
        logits += jnp.broadcast_to(lm_head["bias"].astype(wide), logits.shape)
    return logits


def check_dropout(rate: float) -> None:
    """Refuse a rate of `heads.dropout` outside [0, 1).

    Raises:
      UserError: the rate is outside.
    """
    if not 0 <= rate < 1:
        raise UserError(f"heads.dropout is from 0 to below 1, not {rate}")


class SeparateHeads(Drafter):
    """Base class of drafters whose head k has its own parameters, "heads_{k}"."""

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        return lm_head_logits(self.heads, params[f"heads_{k}"], backbone, features)

    def fill(
        self,
        params: Params,
        backbone: Backbone,
        features: Sequence[jax.Array],
        request: DraftRequest,
    ) -> Proposal:
        """Fill the tree from the features [B, D] of the first heads, one for each of its depths."""
        if features and self.heads.lm_head == "shared":  # one pass over the LM head for all
            logits_BKO = backbone.lm_head(jnp.stack(features, axis=1))
            logits = [logits_BKO[:, k] for k in range(len(features))]
        else:
            heads = enumerate(features)
            logits = [self.head_logits(params, backbone, k, x) for k, x in heads]
        return fill_by_rank(request, backbone, logits)


class LastHidden(SeparateHeads):
    """Base class of drafters that read one vector of the text, which is their whole state."""

    def start(self, batch: int, slots: int, dtype: DTypeLike) -> PyTree:
        """The last accepted hidden state [B, D]."""
        return jnp.zeros((batch, self.llama.d_model), dtype)

    def commit(
        self, params: Params, backbone: Backbone, state: PyTree, new: Committed
    ) -> PyTree:
        return take_last(new.hidden_BTE, new.n_B, state)
