"""Modules of the backbone: linear layers, the RMS norm, attention, the MLP and the decoder layer."""

from collections.abc import Callable, Mapping
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.arch import LlamaConfig
from medusa_jax.model.attention import attention_of
from medusa_jax.model.draft_caches import LayerCache
from medusa_jax.model.dropout import dropout_by_seed
from medusa_jax.model.kernels import PLAIN, Kernels
from medusa_jax.model.masks import LayerMask, Mask, tree_mask
from medusa_jax.model.product import product
from medusa_jax.model.quantise import quantised_product
from medusa_jax.model.stored import Kernel, Stored
from medusa_jax.sharding import Params, PyTree


class Linear(nn.Module):
    """y = x W (+ b), kernel [in, out]; computed in `dtype`, accumulated in float32 or wider.

    Depending on its variables, W is quantised (`model/quantise.py`) or stored in another form
    (`model/stored.py`), and a low-rank adapter is added (`model/lora.py`).
    """

    # Outputs of a new kernel. A given one has its own number: an LM head may score the draft vocabulary alone.
    features: int
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32
    # 0: a plain kernel. n: outputs grouped by tensor shard, kernel [in, n, features // n].
    shards: int = 0
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (
            (self.shards, self.features // self.shards) if self.shards else (self.features,)
        )
        x = x.astype(self.dtype)
        if self.has_variable("params", "codes"):
            codes: jax.Array = self.get_variable("params", "codes")
            scales: jax.Array = self.get_variable("params", "scales")
            y = quantised_product(x, codes, scales)
        else:
            if self.has_variable("params", "kernel"):
                kernel: Kernel = self.get_variable("params", "kernel")
            else:
                init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0)
                kernel = self.param("kernel", init, (x.shape[-1], *width))
            y = self.product(x, kernel)
            y = y.reshape(*x.shape[:-1], *width) if self.shards else y
        y = add_adapter(self, x, y)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, width)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y.astype(self.dtype)

    def product(self, x: jax.Array, kernel: Kernel) -> jax.Array:
        """x W. A method, so that interceptors see it (`learning/moments.py`)."""
        return self.kernels.multiply(x, kernel, self.dtype)


def with_adapter(adapter: Mapping[str, PyTree], x: jax.Array, y: jax.Array) -> jax.Array:
    """y + (dropout(x) A) B, in float32 or wider; inputs are dropped only if the adapter has a seed.

    Args:
      adapter: a, b and keep (1 - dropout rate), as `lora.scale` and `lora.with_dropout` make them.
    """
    a, b, dtype = adapter["a"], adapter["b"], x.dtype
    if "seed" in adapter:
        x = dropout_by_seed(x, 1 - adapter["keep"], adapter["seed"])
    return y + product(product(x, a.astype(dtype)).astype(dtype), b.astype(dtype))


def add_adapter(module: nn.Module, x: jax.Array, y: jax.Array) -> jax.Array:
    """y plus the output for x of the module's adapter in the collection "lora"; y if it has none."""
    if not module.has_variable("lora", "a"):
        return y
    return with_adapter(module.variables["lora"], x, y)


class Adapter(nn.Module):
    """An adapter without a layer, for a tied LM head."""

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return add_adapter(self, x, y)


class Embed(nn.Embed):
    """Rows of a table [tokens, width] in any storage form; GGUF blocks are unpacked on lookup."""

    def setup(self) -> None:
        if self.has_variable("params", "embedding"):
            self.embedding = self.get_variable("params", "embedding")
        else:
            super().setup()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        if isinstance(self.embedding, Stored):
            return self.embedding.rows(tokens).astype(self.dtype)
        return super().__call__(tokens)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, the mean square in float32 or wider."""

    eps: float
    dtype: DTypeLike = jnp.float32
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return self.kernels.norm(x, scale, self.eps, self.dtype)


def row_of(x_BT: jax.Array, row_B: jax.Array | None) -> jax.Array:
    """One of T rows per batch entry, [B, T, ...] -> [B, 1, ...], clipped to the last; None: all rows."""
    if row_B is None:
        return x_BT
    return jax.vmap(lambda x_T, row: lax.dynamic_slice_in_dim(x_T, row, 1))(x_BT, row_B)


class Attention(nn.Module):
    """Self-attention; the caller passes the rotation, the mask and (in decoding) the cache.

    With `only_B` one new token per row has an output, [B, 1, D]. It sees the cached text and
    the new tokens up to itself; the others only get keys and values.

    Returns the output, and the cache with the new keys and values (without a cache, only these).
    """

    config: LlamaConfig
    dtype: DTypeLike
    shards: int
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask: Mask,
        cache: LayerCache | None = None,
        start_B: jax.Array | None = None,
        only_B: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        c = self.config
        B, T, _ = x_BTD.shape
        queried_BTD = row_of(x_BTD, only_B)
        if only_B is not None:
            assert isinstance(cache, tuple) and start_B is not None and not self.shards
            slots, itself = cache[0].shape[2], jnp.ones((1, 1), bool)
            mask = tree_mask(slots, start_B + only_B, itself)
        queries, keys = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        sizes = [queries, keys, keys]
        if self.shards:
            fused = Linear(
                sum(sizes),
                c.qkv_bias,
                self.dtype,
                self.shards,
                self.kernels,
                name="qkv_proj",
            )
            cuts = np.cumsum(sizes)[:2] // self.shards
            out = fused(x_BTD)
            # Split without the axis of one shard; a TPU would change the layout of its slices twice.
            out = out.reshape(B, T, -1) if self.shards == 1 else out
            q, k, v = jnp.split(out, cuts, axis=-1)
        else:
            q, k, v = (
                Linear(size, c.qkv_bias, self.dtype, kernels=self.kernels, name=name)(x)
                for size, name, x in zip(
                    sizes, ("q_proj", "k_proj", "v_proj"), (queried_BTD, x_BTD, x_BTD)
                )
            )
        q_BTNH = q.reshape(B, -1, c.n_heads, c.head_dim)
        k_BTGH = k.reshape(B, T, c.n_kv_heads, c.head_dim)
        # NaN in the key is enough for those who see a token; for others 0 * NaN would be NaN.
        v_BTGH = jnp.where(jnp.isnan(v), 0, v).reshape(B, T, c.n_kv_heads, c.head_dim)
        if c.qk_norm and not c.qk_norm_late:
            q_BTNH = self.normed_heads("q_norm", q_BTNH)
            k_BTGH = self.normed_heads("k_norm", k_BTGH)
        q_BTNH = self.kernels.rotate(q_BTNH, *(row_of(x, only_B) for x in rope))
        k_BTGH = self.kernels.rotate(k_BTGH, *rope)
        if c.qk_norm and c.qk_norm_late:
            q_BTNH = self.normed_heads("q_norm", q_BTNH)
            k_BTGH = self.normed_heads("k_norm", k_BTGH)
        if c.query_multiplier != 1:
            q_BTNH = q_BTNH * c.query_multiplier
        k_BGTH = k_BTGH.transpose(0, 2, 1, 3)
        v_BGTH = v_BTGH.transpose(0, 2, 1, 3)
        new = (k_BGTH, v_BGTH)
        out_BTD, written = attention_of(self.kernels, q_BTNH, new, mask, cache, start_B)
        project = Linear(
            c.d_model, c.out_bias, self.dtype, kernels=self.kernels, name="o_proj"
        )
        return project(out_BTD), written

    def normed_heads(self, name: str, x_BTNH: jax.Array) -> jax.Array:
        """Queries or keys after their norm."""
        norm = RMSNorm(self.config.rms_eps, self.dtype, self.kernels, name=name)
        if not self.config.qk_norm_full:
            return norm(x_BTNH)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)


# Activations of an MLP, by `LlamaConfig.activation`.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nn.silu,
    "gelu_tanh": partial(nn.gelu, approximate=True),
    "relu2": lambda x: jnp.square(nn.relu(x)),
}


class Mlp(nn.Module):
    """SwiGLU, down(silu(gate(x)) * up(x)), or with another activation, or without the gate."""

    config: LlamaConfig
    dtype: DTypeLike
    shards: int
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        linear = partial(
            Linear, use_bias=c.mlp_bias, dtype=self.dtype, kernels=self.kernels
        )
        activation = ACTIVATIONS[c.activation]
        if not c.gated_mlp:
            inner = activation(linear(c.d_ff, name="up_proj")(x_BTD))
            return linear(c.d_model, name="down_proj")(inner)
        if self.shards:
            fused = linear(2 * c.d_ff, shards=self.shards, name="gate_up_proj")
            gate, up = jnp.split(fused(x_BTD), 2, axis=-1)
        else:
            gate = linear(c.d_ff, name="gate_proj")(x_BTD)
            up = linear(c.d_ff, name="up_proj")(x_BTD)
        inner = (activation(gate) * up).reshape(*x_BTD.shape[:-1], c.d_ff)
        return linear(c.d_model, name="down_proj")(inner)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); attention reads `input_BTI` instead if it is given.

    The configuration may leave these norms out and norm the outputs of attention and MLP. Norms are named as in Hugging
    Face files: `post_attention_layernorm` norms the MLP's input or, with `post_norm`, the output of attention.
    `only_B` as in `Attention`.
    """

    config: LlamaConfig
    dtype: DTypeLike
    shards: int = 0
    kernels: Kernels = PLAIN

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask: Mask,
        cache: LayerCache | None = None,
        start_B: jax.Array | None = None,
        only_B: jax.Array | None = None,
        *,
        input_BTI: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        c = self.config
        if isinstance(mask, LayerMask):
            assert isinstance(cache, tuple) and start_B is not None
            layer = self.variables["params"]
            x_BTD, cache = self.kernels.layer(
                c, layer, x_BTD, rope, mask, cache, start_B, input_BTI
            )
            return row_of(x_BTD, only_B), cache
        norm = partial(RMSNorm, c.rms_eps, self.dtype, self.kernels)
        if input_BTI is None:
            input_BTI = norm(name="input_layernorm")(x_BTD) if c.pre_norm else x_BTD
        attention = Attention(c, self.dtype, self.shards, self.kernels, name="self_attn")
        out_BTD, cache = attention(input_BTI, rope, mask, cache, start_B, only_B)
        x_BTD = self.plus(row_of(x_BTD, only_B), out_BTD, "post_attention_layernorm")
        normed_BTD = norm(name=mlp_norm(c))(x_BTD) if c.pre_norm else x_BTD
        mlp = Mlp(c, self.dtype, self.shards, self.kernels, name="mlp")
        return self.plus(x_BTD, mlp(normed_BTD), "post_feedforward_layernorm"), cache

    def plus(self, x_BTD: jax.Array, out_BTD: jax.Array, norm: str) -> jax.Array:
        """x plus what a sublayer adds to it; its norm has this name."""
        c = self.config
        if c.post_norm:
            out_BTD = RMSNorm(c.rms_eps, self.dtype, self.kernels, name=norm)(out_BTD)
        if c.residual_multiplier != 1:
            out_BTD = out_BTD * c.residual_multiplier
        return x_BTD + out_BTD


def mlp_norm(config: LlamaConfig) -> str:
    """Name of the norm before the MLP."""
    return "pre_feedforward_layernorm" if config.post_norm else "post_attention_layernorm"


def zero_output(layer: Params) -> Params:
    """Make a decoder layer the identity: zero the last kernels of its attention and its MLP."""
    out = dict(layer)
    for room, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
        out[room] = layer[room] | {name: jax.tree.map(jnp.zeros_like, layer[room][name])}
    return out
