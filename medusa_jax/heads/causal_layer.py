"""A drafter's decoder layers over the text, and their cache."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.heads.drafter import Params
from medusa_jax.heads.layers import take_last
from medusa_jax.heads.state import CacheState
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.cache import KVCache, Pair
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import DecoderLayer, RMSNorm, zero_output
from medusa_jax.model.masks import CausalMask, Mask, PathMask, as_path
from medusa_jax.model.rope import rope_tables


class CausalLayer(nn.Module):
    """A decoder layer of the backbone's shape over given vectors, followed by a norm.

    Attention covers the whole text; the backbone's sliding window does not apply.
    """

    config: LlamaConfig
    dtype: DTypeLike
    out_norm: bool = True
    kernels: Kernels = PLAIN

    def setup(self) -> None:
        self.layers_0 = DecoderLayer(self.config, self.dtype, kernels=self.kernels)
        if self.out_norm:
            self.norm = RMSNorm(self.config.rms_eps, self.dtype, self.kernels)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        mask: Mask,
        cache: Pair | None = None,
        start_B: jax.Array | None = None,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Pair]:
        """Outputs of T rows, and the cache with their keys and values; arguments as for `Attention`."""
        rope = rope_tables(self.config, positions_BT, self.dtype)
        x_BTD, new = self.layers_0(
            x_BTD.astype(self.dtype), rope, mask, cache, start_B, only_B
        )
        assert isinstance(new, tuple)
        return (self.norm(x_BTD) if self.out_norm else x_BTD), new

    @classmethod
    def start(
        cls, key: jax.Array, config: LlamaConfig, backbone: Backbone, out_norm: bool = True
    ) -> Params:
        """Fresh parameters that make the layer the identity on hidden states (nearly).

        It adds zero to its input, and its norm gives the same size as the backbone's final norm.
        """
        probe = jnp.zeros((1, 1, config.d_model))
        ones = jnp.ones((1, 1), jnp.int32)
        module = cls(config, jnp.float32, out_norm)
        params: Params = module.init(key, probe, ones, CausalMask())["params"]
        params["layers_0"] = zero_output(params["layers_0"])
        if out_norm:
            size = jnp.sqrt(
                jnp.mean(backbone.params["norm"]["scale"].astype(jnp.float32) ** 2)
            )
            params["norm"] = {"scale": jnp.broadcast_to(size, (config.d_model,))}
        return params


class LayerState(CacheState):
    """State of a drafter with causal layers, which see accepted positions only.

    Attributes:
      context_BSD: output of each layer at the last accepted position.
    """

    context_BSD: jax.Array

    @classmethod
    def zeros(
        cls, config: LlamaConfig, n_layers: int, batch: int, slots: int, dtype: DTypeLike
    ) -> "LayerState":
        """The state before any text. Without layers there is one context: the backbone's hidden state."""
        cache = KVCache.zeros(config, batch, slots, dtype, n_layers)
        context = jnp.zeros((batch, max(n_layers, 1), config.d_model), dtype)
        return cls(jnp.zeros((batch,), jnp.int32), cache, context)

    def text_mask(self, kernels: Kernels, T: int) -> Mask:
        """The mask of T tokens that continue the accepted text."""
        path_TT = as_path(T)
        return CausalMask() if path_TT is None else self.path_mask(kernels, path_TT)

    def path_mask(self, kernels: Kernels, mask_TR: jax.Array) -> Mask:
        """The mask of T nodes, which see the R rows after the accepted text by `mask_TR`."""
        return kernels.mask_of(PathMask(mask_TR), self.cache, self.length_B)

    def extended(
        self, layers: Sequence[Pair], contexts: list[jax.Array], n_B: jax.Array
    ) -> "LayerState":
        """The state after n more positions, with all T candidates written to the cache.

        Candidates after the n-th are invisible from now on; the next call overwrites them.

        Args:
          contexts: outputs of each layer, for all T candidates or only for the n-th [B, 1, D].
        """
        old = [self.context_BSD[:, s] for s in range(len(contexts))]
        new = [take_last(rows, n_B, context) for rows, context in zip(contexts, old)]
        cache = KVCache(layers=tuple(layers))
        return LayerState(self.length_B + n_B, cache, jnp.stack(new, axis=1))
