"""The backbone: a Llama-like transformer as a pure function of its parameters.

One module serves training (`forward`: causal, packed segments, no cache) and decoding
(`decode`: T tokens per row after a cached prefix; they see each other by a static mask, the ancestor mask of
a draft tree, or causally in a prompt).
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
from medusa_jax.model.layers import Adapter, Block, Embed, Linear, RMSNorm
from medusa_jax.model.masks import CausalMask, Mask, PathMask, mask_after
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.rope import rope_tables
from medusa_jax.sharding import Params, PyTree, split_embedded, split_rows


@partial(jax.jit, static_argnums=0)
def _run_layer(block: Block, variables: Params, *args: PyTree) -> PyTree:
    """Apply an unbound `Block`.

    Under `jit`, a program traces and lowers one layer instead of each; XLA inlines the calls.
    """
    return block.apply(variables, *args)


class Llama(nn.Module):
    """A Llama-like backbone.

    Attributes:
      config: its shape.
      dtype: the type of computations (parameters may be stored in another).
      remat: recompute each block's activations in the backward pass.
      shards: 0 for stored (unfused) parameters; n for parameters that `prepare` fused for a
        tensor axis of n devices.
      mesh: the devices that rows are split over; None: no constraint.
      scored: number of outputs of the LM head if it scores only some tokens; 0: the vocabulary.
      kernels: the operations that differ by platform (`kernels/choose.py`).
      taps: layers whose input (the residual stream) is returned as well; `n_layers` is the output of
        the last one. With A of them hidden states are E = (1 + A) D wide: the final ones first.
    """

    config: LlamaConfig
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    shards: int = 0
    mesh: Mesh | None = None
    scored: int = 0
    kernels: Kernels = PLAIN
    taps: tuple[int, ...] = ()

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embed_tokens = Embed(
            c.vocab_size, c.d_model, dtype=self.dtype, embedding_init=init
        )
        self.layers = [
            Block(c, self.dtype, self.shards, self.kernels) for _ in range(c.n_layers)
        ]
        self.norm = RMSNorm(c.rms_eps, self.dtype, self.kernels)
        if not c.tie_embeddings:
            outputs = self.scored or c.vocab_size
            self.head = Linear(
                outputs, False, self.dtype, kernels=self.kernels, name="lm_head"
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

    def decode(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
        self_mask_TR: jax.Array | None = None,
        count_B: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """T tokens per row after a cached prefix.

        Args:
          tokens_BT, positions_BT: the new tokens; `positions = start + depth`.
          cache: keys and values; slots [0, start) of a row are its text, where slot = position.
          start_B: length of the text; the next R slots are used.
          self_mask_TR: [t, r] is True where new token t sees row r after the text (itself included).
            The last T rows are the new tokens; earlier rows, if R > T, are nodes of the same tree from
            previous calls. None: the tokens are a text and see causally.
          count_B: tokens of such a text; the rest is padding, whose results mean nothing. None: all.

        Returns: hidden states after the final norm [B, T, E], and the cache with the new rows.
        """
        masks = self._masks(positions_BT, cache.slots, start_B, self_mask_TR, count_B)
        if self_mask_TR is not None:
            start_B = start_B + (self_mask_TR.shape[1] - tokens_BT.shape[1])
        hidden_BTE, layers = self._run(tokens_BT, positions_BT, masks, cache, start_B)
        return hidden_BTE, KVCache(layers=tuple(layers))

    def _masks(
        self,
        positions_BT: jax.Array,
        slots: int,
        start_B: jax.Array,
        self_mask_TR: jax.Array | None,
        count_B: jax.Array | None,
    ) -> tuple[Mask, Mask]:
        """The masks of new tokens in layers without and with the sliding window."""
        window = self.config.sliding_window
        T = positions_BT.shape[1]
        fused = self.kernels.fuses(self.config.head_dim)
        if fused and self_mask_TR is None:
            text = PathMask(jnp.ones((T, 0), bool), count_B)
            return text, text.replace(window=window)
        mask = mask_after(T, slots, start_B, self_mask_TR, fused)
        if isinstance(mask, CausalMask | PathMask):
            return mask, mask.replace(window=window)
        if not window:
            return mask, mask
        R, slot_S = T if self_mask_TR is None else self_mask_TR.shape[1], jnp.arange(slots)
        offset_BS = slot_S[None, :] - start_B[:, None]
        inside_BS = (offset_BS >= 0) & (offset_BS < R)
        # The position of a tree node is the prefix length plus its depth, not its slot. Nodes of previous
        # calls, a few positions back, count as inside the window.
        node_BS = jnp.take_along_axis(
            positions_BT, jnp.clip(offset_BS - (R - T), 0, T - 1), axis=1
        )
        position_BS = jnp.where(inside_BS, node_BS, slot_S[None, :])
        oldest_BT = positions_BT - window
        return mask, mask & (position_BS[:, None, :] > oldest_BT[:, :, None])

    def _run(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        masks: tuple[Mask, Mask],
        cache: KVCache | None = None,
        start_B: jax.Array | None = None,
    ) -> tuple[jax.Array, list[tuple[jax.Array, jax.Array]]]:
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
        for i, block in enumerate(self.layers):
            x_BTD = split_rows(self.mesh, x_BTD)
            streams.append(x_BTD)
            rope, mask = ropes[rotations[i]], masks[c.has_window(i)]
            if self.remat and not self.is_initializing():
                x_BTD = self._run_rematerialised(block, x_BTD, rope, mask)
                continue
            layer_cache = cache.layers[i] if cache is not None else None
            # Initialisation needs the bound layer, to create its parameters.
            run = block if self.is_initializing() else partial(_run_layer, *block.unbind())
            x_BTD, written = run(x_BTD, rope, mask, layer_cache, start_B)
            assert isinstance(written, tuple)
            layers.append(written)
        x_BTD = split_rows(self.mesh, x_BTD)
        streams.append(x_BTD)
        hidden_BTD = self.norm(x_BTD)
        if not self.taps:
            return hidden_BTD, layers
        tapped = [streams[i] for i in self.taps]
        return jnp.concatenate([hidden_BTD, *tapped], axis=-1), layers

    def _run_rematerialised(
        self, block: Block, x_BTD: jax.Array, rope: tuple[jax.Array, jax.Array], mask: Mask
    ) -> jax.Array:
        """Run a block whose activations the backward pass recomputes."""
        unbound, variables = block.unbind()

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
