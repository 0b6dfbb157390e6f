"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and 3.1: a decoder layer on inner streams.

    g_i = FC([l_i ; m_i ; h_i])                   the streams that enter layers 2, L / 2 and L - 3
    x_i = a_i + Attention([norm(e_{i+1}) ; norm(a_i)])
    a'_i = x_i + MLP(norm(x_i))                   logits of token i + 2 = LM-Head(norm(a'_i))

a is g for accepted positions and the parent's a' for drafted ones; e embeds the next token.
`levels.py`, shared with EAGLE-1, drafts and trains the levels. The LM head belongs
to the drafter, usually over a draft vocabulary (`vocabulary.py`); the embedding is the
backbone's.

Training unrolls `train.levels` levels (7 in the authors' code) with gradients through all
of them (training-time test, section 3.2). The loss of a level is the cross-entropy with the
backbone's distribution, renormalised over the draft vocabulary (`train.teacher_weight`);
hidden states are not regressed. Level k has the weight `train.lambda_decay`^k. A
position counts if its next tokens count and its label is in the draft vocabulary. (The
authors test the backbone's argmax instead, which equals the label in text that the backbone
wrote greedily.)

EAGLE-3.1 adds a norm for each stream before FC (`fc_norm`) and passes the normed a' to the next level
(`norm_output`). Both bound the scale of deep levels' inputs; neither is in the paper.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.heads.drafter import Params
from medusa_jax.heads.levels import LevelDrafter, Stack
from medusa_jax.heads.tapped import TappedConfig, TappedDrafter
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import DecoderLayer, Linear, RMSNorm
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import PyTree


@dataclass(unsafe_hash=True)
class Eagle3Config(TappedConfig):
    """`n_heads` limits the depth of trees; all depths share `n_layers` decoder layers."""

    drafter: str = "eagle3"
    n_heads: int = 7
    # EAGLE-3.1: norms of the streams before FC; the next level reads the normed output.
    fc_norm: bool = False
    norm_output: bool = False
    # The residual around the attention is norm(a), not a.
    norm_before_residual: bool = False


class WideLayer(DecoderLayer):
    """A decoder layer whose attention reads [norm(e) ; norm(a)], 2 D wide."""

    norm_before_residual: bool = False

    @nn.compact
    def __call__(  # type: ignore[override]
        self, streams: tuple[jax.Array, jax.Array], *context: PyTree
    ) -> PyTree:
        """a and e instead of x, the rest as in `DecoderLayer`."""
        x_BTD, next_BTD = streams
        norm = partial(RMSNorm, self.config.rms_eps, self.dtype, self.kernels)
        normed_BTD = norm(name="hidden_norm")(x_BTD)
        inputs = [norm(name="input_layernorm")(next_BTD), normed_BTD]
        x_BTD = normed_BTD if self.norm_before_residual else x_BTD
        return super().__call__(x_BTD, *context, input_BTI=jnp.concatenate(inputs, axis=-1))


class Layers(Stack):
    """FC, the decoder layers and the norm before the LM head, of the backbone's shape."""

    heads: Eagle3Config
    n_taps: int

    def setup(self) -> None:
        c, dtype, h = self.config, self.dtype, self.heads
        norm = partial(RMSNorm, c.rms_eps, dtype, self.kernels)
        layer = partial(DecoderLayer, c, dtype, kernels=self.kernels)
        self.fc = Linear(c.d_model, False, dtype, kernels=self.kernels)
        if h.fc_norm:
            self.fc_norms = [norm() for _ in range(self.n_taps)]
        first = WideLayer(
            c, dtype, kernels=self.kernels, norm_before_residual=h.norm_before_residual
        )
        self.layers = [first, *(layer() for _ in range(1, h.n_layers))]
        self.norm = norm()

    def first_input(self, streams: jax.Array) -> jax.Array:
        """Tapped streams [..., A D] -> g [..., D]."""
        parts = jnp.split(streams.astype(self.dtype), self.n_taps, axis=-1)
        if self.heads.fc_norm:
            parts = [norm(x) for norm, x in zip(self.fc_norms, parts, strict=True)]
        return self.fc(jnp.concatenate(parts, axis=-1))

    def normed(self, x: jax.Array) -> jax.Array:
        """a' -> input of the LM head."""
        return self.norm(x)

    def first(self, x_BTD: jax.Array, next_BTD: jax.Array) -> PyTree:
        """The first layer reads both."""
        return x_BTD, next_BTD

    def last(self, x_BTD: jax.Array) -> jax.Array:
        """The next level may read the normed output."""
        return self.norm(x_BTD) if self.heads.norm_output else x_BTD

    def all(
        self, streams: jax.Array, next_BTD: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        """Run every part once, to initialise all parameters."""
        x_BTD, _ = self(self.first_input(streams), next_BTD, positions_BT, CausalMask())
        return self.normed(x_BTD)


@dataclasses.dataclass(frozen=True)
class Eagle3(TappedDrafter, LevelDrafter):
    """The layers continue streams from inside the backbone."""

    heads: Eagle3Config

    Config = Eagle3Config

    @property
    def paper_taps(self) -> tuple[int, ...]:
        """The layers that the paper reads."""
        L = self.llama.n_layers  # fewer than five: the nearest that exist
        return tuple(sorted(min(max(i, 0), L) for i in (2, L // 2, L - 3)))

    def layers(self, dtype: DTypeLike, kernels: Kernels = PLAIN) -> Layers:
        return Layers(self.shape, dtype, kernels, self.heads, len(self.taps))

    def first_input(
        self, params: Params, backbone: Backbone, hidden_BTE: jax.Array
    ) -> jax.Array:
        streams = hidden_BTE[..., self.llama.d_model :]
        return self.run(params, backbone, streams, method="first_input")

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """At the start the layers output the last tap's stream; norm and LM head are the backbone's."""
        D, A = self.llama.d_model, len(self.taps)
        probe, ones = jnp.zeros((1, 1, D)), jnp.ones((1, 1), jnp.int32)
        streams = jnp.zeros((1, 1, A * D))
        module = self.layers(jnp.float32)
        params: Params = dict(
            module.init(key, streams, probe, ones, method="all")["params"]
        )
        params["fc"] = {"kernel": jnp.eye(A * D, D, -(A - 1) * D)}  # [0 ; 0 ; I]
        params["norm"] = jax.tree.map(
            lambda x: x.astype(jnp.float32), backbone.params["norm"]
        )
        return self.start_as_identity(params, backbone)

    @property
    def head_entries(self) -> tuple[str, ...]:
        return ("lm_head",) if self.heads.norm_output else ("lm_head", "norm")

    def head_logits(
        self, params: Params, backbone: Backbone, k: int, features: jax.Array
    ) -> jax.Array:
        if not self.heads.norm_output:
            features = self.run(params, backbone, features, method="normed")
        return super().head_logits(params, backbone, k, features)
