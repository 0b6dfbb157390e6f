"""EAGLE-1 (Li et al., ICML 2024): decoder layers that continue the hidden states themselves.

    f^_{i+1} = Layers(FC([e_{i+1} ; f_i]))    logits of token i + 2 = LM-Head(f^_{i+1})

f is the backbone's hidden state for accepted positions and the parent's f^ for drafted
ones; e embeds the next token. One small model thus drafts to any depth: the layers cache
keys and values of accepted positions; each node of the tree attends to them and to its
path. LM head and embedding are the backbone's. As in the released code, the first layer has
no norm before its attention, and no norm follows the last layer.

By default only the first level is trained (3.2): it reads true hidden states with added noise, and
learns the next hidden state and its distribution. In decoding, deeper levels read the outputs of earlier
ones; `train.levels` trains on those too (HASS, arXiv 2408.15766; EAGLE-3's training-time test,
arXiv 2503.01840), with gradients through all levels.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import HeadsConfig, LlamaConfig
from medusa_jax.bounds import AtLeast
from medusa_jax.heads.drafter import Params
from medusa_jax.heads.levels import LevelDrafter, Stack
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import DecoderLayer, Linear
from medusa_jax.model.masks import CausalMask
from medusa_jax.sharding import PyTree


@dataclass(unsafe_hash=True)
class EagleConfig(HeadsConfig):
    """`n_heads` limits the depth of trees; all depths share `n_layers` decoder layers."""

    drafter: str = "eagle"
    n_heads: int = 5
    lm_head: str = "shared"
    fc_bias: bool = True
    # Width of the layers' MLP; 0: the backbone's.
    d_ff: Annotated[int, AtLeast(0)] = 0
    # Epsilon of the norms; 0: the backbone's.
    rms_eps: float = 0.0


class FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads x without a norm."""

    def __call__(self, x_BTD: jax.Array, *context: PyTree) -> PyTree:  # type: ignore[override]
        return super().__call__(x_BTD, *context, input_BTI=x_BTD)


class Layers(Stack):
    """FC and the decoder layers."""

    n_layers: int
    fc_bias: bool

    def setup(self) -> None:
        dtype, kernels = self.dtype, self.kernels
        self.fc = Linear(self.config.d_model, self.fc_bias, dtype, kernels=kernels)
        kinds = [FirstLayer] + [DecoderLayer] * (self.n_layers - 1)
        self.layers = [layer(self.config, dtype, kernels=kernels) for layer in kinds]

    def first(self, x_BTD: jax.Array, next_BTD: jax.Array) -> jax.Array:
        """FC of e and f."""
        return self.fc(jnp.concatenate([next_BTD, x_BTD], axis=-1))


@dataclasses.dataclass(frozen=True)
class Eagle(LevelDrafter):
    """The layers continue the backbone's final hidden states."""

    heads: EagleConfig

    Config = EagleConfig

    @property
    def shape(self) -> LlamaConfig:
        c, h = self.llama, self.heads
        return dataclasses.replace(c, d_ff=h.d_ff or c.d_ff, rms_eps=h.rms_eps or c.rms_eps)

    def layers(self, dtype: DTypeLike, kernels: Kernels = PLAIN) -> Layers:
        h = self.heads
        return Layers(self.shape, dtype, kernels, h.n_layers, h.fc_bias)

    def init(self, key: jax.Array, backbone: Backbone) -> Params:
        """Layers start as f -> f, so all depths start as the LM head."""
        D = self.llama.d_model
        probe, ones = jnp.zeros((1, 1, D)), jnp.ones((1, 1), jnp.int32)
        module = self.layers(jnp.float32)
        params: Params = dict(module.init(key, probe, probe, ones, CausalMask())["params"])
        params["fc"] = params["fc"] | {"kernel": jnp.eye(2 * D, D, -D)}  # [0 ; I]
        return self.start_as_identity(params, backbone)
