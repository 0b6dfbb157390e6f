"""Medusa heads (Medusa 2.1.1): each guesses one later token from the last hidden state alone."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads.drafter import Base, Drafter, Params, RankScores
from medusa_jax.model.llama import Linear
from medusa_jax.tree import Tree


class ResBlock(nn.Module):
    """x + SiLU(x W + b) with W = 0 and b = 0 at the start: the identity."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        D = x.shape[-1]
        kernel = self.param("kernel", nn.initializers.zeros, (D, D)).astype(self.dtype)
        bias = self.param("bias", nn.initializers.zeros, (D,)).astype(self.dtype)
        y = lax.dot_general(
            x,
            kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        return x + nn.silu(y + jnp.broadcast_to(bias, y.shape))


class LowRank(nn.Module):
    """Logits through a bottleneck: x (D -> rank -> V)."""

    rank: int
    vocab_size: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        down = self.param("down", init, (x.shape[-1], self.rank)).astype(self.dtype)
        up = self.param("up", init, (self.rank, self.vocab_size)).astype(self.dtype)
        return jnp.dot(jnp.dot(x, down), up, preferred_element_type=jnp.float32)


class MedusaHead(nn.Module):
    """p^(k) = softmax(W2 (SiLU(W1 h + b) + h)), with one or more residual blocks before W2."""

    n_layers: int
    lm_head: str
    rank: int
    vocab_size: int
    dtype: Any

    def setup(self) -> None:
        self.layers = [ResBlock(self.dtype) for _ in range(self.n_layers)]
        if self.lm_head == "own":
            self.own: Any = Linear(self.vocab_size, False, self.dtype, name="lm_head")
        elif self.lm_head == "low_rank":
            self.own = LowRank(self.rank, self.vocab_size, self.dtype, name="lm_head")

    def features(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        x = hidden.astype(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x

    def logits(self, features: jax.Array) -> jax.Array:
        """[..., D] -> [..., V] (own or low-rank LM head only)."""
        return self.own(features).astype(jnp.promote_types(self.dtype, jnp.float32))

    def everything(self, hidden: jax.Array) -> jax.Array:
        """Touches every parameter, for initialisation."""
        x = self.features(hidden)
        return x if self.lm_head == "shared" else self.logits(x)


class Medusa(Drafter):
    """K independent heads on the last accepted hidden state, which is all the state there is."""

    def _head(self, dtype: Any) -> MedusaHead:
        h = self.heads
        return MedusaHead(h.n_layers, h.lm_head, h.rank, self.llama.vocab_size, dtype)

    def init(self, key: jax.Array, base: Base) -> Params:
        """W1 = 0 and W2 = the backbone's LM head: every head starts as the LM head itself.

        A low-rank W2 starts as the best rank-R approximation of it (truncated SVD).
        """
        head = self._head(jnp.float32)
        probe = jnp.zeros((1, self.llama.d_model))
        params = {}
        for k, head_key in enumerate(jax.random.split(key, self.n_heads)):
            params[f"heads_{k}"] = head.init(head_key, probe, method="everything")["params"]
        if self.heads.lm_head == "shared":
            return params
        if self.llama.tie_embeddings:
            lm_head_DV = base.params["embed_tokens"]["embedding"].T.astype(jnp.float32)
        else:
            lm_head_DV = base.params["lm_head"]["kernel"].astype(jnp.float32)
        if self.heads.lm_head == "own":
            start = {"kernel": lm_head_DV}
        else:
            u, s, v = jnp.linalg.svd(lm_head_DV, full_matrices=False)
            root = jnp.sqrt(s[: self.heads.rank])
            down = u[:, : self.heads.rank] * jnp.broadcast_to(root, (u.shape[0], root.size))
            up = root[:, None] * v[: self.heads.rank]
            start = {"down": down, "up": up}
        return {
            name: head_params | {"lm_head": start} for name, head_params in params.items()
        }

    def _features(self, params: Params, k: int, hidden: jax.Array, dtype: Any) -> Any:
        head = self._head(dtype)
        return head.apply({"params": params[f"heads_{k}"]}, hidden, method="features")

    def features(
        self,
        params: Params,
        base: Base,
        hidden_BTD: jax.Array,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        dtype = base.llama.dtype
        heads = range(self.n_heads)
        return jnp.stack([self._features(params, k, hidden_BTD, dtype) for k in heads])

    def head_logits(
        self, params: Params, base: Base, k: int, features: jax.Array
    ) -> jax.Array:
        if self.heads.lm_head == "shared":
            return base.lm_head(features)
        head = self._head(base.llama.dtype)
        out: Any = head.apply({"params": params[f"heads_{k}"]}, features, method="logits")
        return out

    def start(self, batch: int, slots: int, dtype: Any) -> jax.Array:
        """The last accepted hidden state [B, D]."""
        return jnp.zeros((batch, self.llama.d_model), dtype)

    def commit(
        self,
        params: Params,
        base: Base,
        state: jax.Array,
        hidden_BTD: jax.Array,
        next_tokens_BT: jax.Array,
        positions_BT: jax.Array,
        n_B: jax.Array,
    ) -> jax.Array:
        last_B11 = jnp.maximum(n_B - 1, 0)[:, None, None]
        last_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
        return jnp.where((n_B > 0)[:, None], last_BD.astype(state.dtype), state)

    def propose(
        self,
        params: Params,
        base: Base,
        state: jax.Array,
        root_B: jax.Array,
        tree: Tree,
        rank_scores: RankScores,
    ) -> jax.Array:
        """Rank r of depth d is the (r+1)-th best guess of head d, whatever the path."""
        if tree.depth == 0:
            return root_B[:, None]
        features = [
            self._features(params, k, state, base.llama.dtype) for k in range(tree.depth)
        ]
        if self.heads.lm_head == "shared":  # one pass over the LM head for all heads
            logits_BKV = base.lm_head(jnp.stack(features, axis=1))
            logits = [logits_BKV[:, k] for k in range(tree.depth)]
        else:
            logits = [self.head_logits(params, base, k, f) for k, f in enumerate(features)]
        scores_BKV = jnp.stack(
            [rank_scores(k + 1, x) for k, x in enumerate(logits)], axis=1
        )
        _, best_BKR = lax.top_k(scores_BKV, tree.max_rank + 1)
        # A gather by constants; slices of the top-k result would compile to a full sort.
        depth_M = jnp.maximum(jnp.asarray(tree.depth_M) - 1, 0)
        drafts_BM = best_BKR[:, depth_M, jnp.asarray(tree.rank_M)]
        is_root_M = jnp.asarray(tree.depth_M) == 0
        return jnp.where(is_root_M[None, :], root_B[:, None], drafts_BM)
