"""The backbone: a Llama-like transformer as a pure function of its parameters.

One module serves training (`forward`: causal, packed segments, no cache) and decoding, where T tokens per row
follow a cached text: they continue it (`read`) or are nodes of a draft tree (`read_tree`).
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.model.barrier import rematerialise
from medusa_jax.model.cache import KVCache, Pair
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.layers import Adapter, DecoderLayer, Embed, Linear, RMSNorm
from medusa_jax.model.masks import CausalMask, LayerMask, Mask, PathMask, TextMask
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rope_tables
from medusa_jax.sharding import Params, PyTree, split_embedded, split_rows


@partial(jax.jit, static_argnums=0)
def _run_layer(layer: DecoderLayer, variables: Params, *args: PyTree) -> PyTree:
    """Apply an unbound `DecoderLayer`.

    Under `jit`, a program traces and lowers one layer instead of each; XLA inlines the calls.
    """
    return layer.apply(variables, *args)


class Llama(nn.Module):
    """A Llama-like backbone.

    Attributes:
      config: its shape.
      dtype: the type of computations (parameters may be stored in another).
      remat: recompute each block's activations in the backward pass.
      shards: 0 for stored (unfused) parameters; n for parameters that `prepare` fused for a
        tensor axis of n devices.
      mesh: the devices that rows are split over; None: no constraint.
      kernels: the operations that differ by platform (`kernels/choose.py`).
      taps: layers whose input (the residual stream) is returned as well; `n_layers` is the output of
        the last one. With A of them hidden states are E = (1 + A) D wide: the final ones first.
    """

    config: LlamaConfig
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    shards: int = 0
    mesh: Mesh | None = None
    kernels: Kernels = PLAIN
    taps: tuple[int, ...] = ()

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embed_tokens = Embed(
            c.vocab_size, c.d_model, dtype=self.dtype, embedding_init=init
        )
        self.layers = [
            DecoderLayer(c, self.dtype, self.shards, self.kernels)
            for _ in range(c.n_layers)
        ]
        self.norm = RMSNorm(c.rms_eps, self.dtype, self.kernels)
        if not c.tie_embeddings:
            self.head = Linear(
                c.vocab_size, False, self.dtype, kernels=self.kernels, name="lm_head"
            )
        else:
            self.head_adapter = Adapter(name="lm_head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, ...] -> embeddings [B, ..., D], rows split over the devices."""
        x = self.embed_tokens(tokens)
        if (multiplier := self.config.embedding_multiplier) != 1:
            x = x * jnp.asarray(multiplier, x.dtype)
        return split_rows(self.mesh, split_embedded(self.mesh, x))

    def lm_head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] or [..., E] -> logits [..., V], float32 or wider."""
        if hidden.shape[-1] > self.config.d_model:  # with taps
            hidden = hidden[..., : self.config.d_model]
        wide, divisor = at_least_f32(self.dtype), self.config.logit_divisor
        if not self.config.tie_embeddings:
            logits = self.head(hidden).astype(wide)
        else:
            logits = lax.dot_general(
                hidden.astype(self.dtype),
                self.embed_tokens.embedding.astype(self.dtype),
                (((hidden.ndim - 1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=wide,
            )
            logits = self.head_adapter(hidden.astype(self.dtype), logits)
        return logits if divisor == 1 else logits / divisor

    def forward(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> jax.Array:
        """Teacher-forced pass over packed rows -> hidden states after the final norm [B, T, E].

        A token sees itself and the earlier tokens of its segment. Segment 0 is padding.
        """
        sliding = CausalMask(segment_ids_BT, self.config.sliding_window)
        return self._run(tokens_BT, positions_BT, (CausalMask(segment_ids_BT), sliding))[0]

    def read(
        self,
        tokens_BT: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
        count_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """The next T tokens of each row's text; they see causally.

        Args:
          cache: keys and values; slots [0, start) of a row are its text, where slot = position.
          start_B: length of the text; the next T slots are used.
          count_B: new tokens of each row; the rest is padding, whose results mean nothing. None: all.

        Returns: hidden states after the final norm [B, T, E], and the cache with the new rows.
        """
        depth_T = jnp.arange(tokens_BT.shape[1])
        masks = self._masks(TextMask(count_B), cache, start_B, depth_T)
        positions_BT = start_B[:, None] + depth_T[None, :]
        return self._run(tokens_BT, positions_BT, masks, cache, start_B)

    def read_tree(
        self,
        tokens_BT: jax.Array,
        depth_T: jax.Array,
        mask_TR: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """T nodes of a draft tree after each row's text.

        Args:
          depth_T: depth of each node; the root, with 0, is the first token after the text.
          mask_TR: [t, r] is True where node t sees row r after the text (itself included). The last T rows are
            the new nodes; earlier ones, if R > T, are nodes of the same tree from previous calls.
          cache, start_B: as in `read`; the last T of the next R slots are used.

        Returns: as `read`.
        """
        T, R = mask_TR.shape
        masks = self._masks(PathMask(mask_TR), cache, start_B, depth_T)
        positions_BT = start_B[:, None] + depth_T[None, :]
        return self._run(tokens_BT, positions_BT, masks, cache, start_B + (R - T))

    def _masks(
        self, seen: LayerMask, cache: KVCache, start_B: jax.Array, depth_T: jax.Array
    ) -> tuple[Mask, Mask]:
        """The masks of layers without and with the sliding window."""
        mask_of = partial(
            self.kernels.mask_of, cache=cache, start_B=start_B, depth_T=depth_T
        )
        mask, window = mask_of(seen), self.config.sliding_window
        return mask, mask_of(seen.replace(window=window)) if window else mask

    def _run(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        masks: tuple[Mask, Mask],
        cache: KVCache | None = None,
        start_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Run all layers; `masks` are for layers without and with the sliding window."""
        c = self.config
        rotations = [c.rotation(i) for i in range(c.n_layers)]
        ropes = {
            rotation: rope_tables(c, positions_BT, self.dtype, rotation)
            for rotation in dict.fromkeys(rotations)
        }
        x_BTD = self.embed(tokens_BT)
        layers: list[Pair] = []
        streams = []
        for i, layer in enumerate(self.layers):
            x_BTD = split_rows(self.mesh, x_BTD)
            streams.append(x_BTD)
            rope, mask = ropes[rotations[i]], masks[c.has_window(i)]
            if self.remat and not self.is_initializing():
                x_BTD = self._run_rematerialised(layer, x_BTD, rope, mask)
                continue
            layer_cache = cache.layers[i] if cache is not None else None
            # Initialisation needs the bound layer, to create its parameters.
            run = layer if self.is_initializing() else partial(_run_layer, *layer.unbind())
            x_BTD, written = run(x_BTD, rope, mask, layer_cache, start_B)
            assert isinstance(written, tuple)
            layers.append(written)
        x_BTD = split_rows(self.mesh, x_BTD)
        streams.append(x_BTD)
        hidden_BTE = self.norm(x_BTD)
        if self.taps:
            tapped = [streams[i] for i in self.taps]
            hidden_BTE = jnp.concatenate([hidden_BTE, *tapped], axis=-1)
        return hidden_BTE, KVCache(layers=tuple(layers))

    def _run_rematerialised(
        self, layer: DecoderLayer, x_BTD: jax.Array, rope: Pair, mask: Mask
    ) -> jax.Array:
        """Run a layer whose activations the backward pass recomputes."""
        unbound, variables = layer.unbind()

        def run(variables: Params, *args: PyTree) -> jax.Array:
            return _run_layer(unbound, variables, *args)[0]

        trained = "lora" if "lora" in variables else "params"
        recomputed = rematerialise(run, trained)
        return recomputed(variables, x_BTD, rope, mask)


@partial(jax.jit, static_argnums=(0, 2))
def init_params(
    config: LlamaConfig, key: jax.Array, param_dtype: DTypeLike = jnp.float32
) -> Params:
    """Random parameters: embedding N(0, 0.02), kernels N(0, 1/fan_in).

    Under `jit`, the layers are traced only once per process.
    """

    def touch_all(module: Llama) -> jax.Array:
        ones = jnp.ones((1, 1), jnp.int32)
        return module.lm_head(module.forward(ones, ones, ones))

    params = Llama(config).init(key, method=touch_all)["params"]
    return jax.tree.map(lambda x: x.astype(param_dtype), params)


def decoding_config(config: LlamaConfig) -> LlamaConfig:
    """The shape of the parameters that `prepare` returns: no tied LM head."""
    return dataclasses.replace(config, tie_embeddings=False)
