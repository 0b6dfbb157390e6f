"""The backbone: a Llama-family transformer as a pure function of its parameters.

One module serves training (`forward`: causal, packed segments, no cache) and decoding
(`decode`: T tokens per row after a cached prefix, seeing each other through a static mask,
which is the lower triangle for a prompt and the tree's ancestor mask for a draft tree).
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.config import LlamaConfig
from medusa_jax.model.cache import KVCache, write_rows

Params = dict[str, Any]


def at_least_f32(dtype: Any) -> Any:
    """float32 for 16-bit types, else the type itself: where norms and softmax are computed."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] times kernel [in, ...], accumulated in float32 or wider.

    The automatic gradient takes dW as (dyᵀ x)ᵀ; a CPU needs nearly twice the time for that as
    for xᵀ dy, which is what the rule below asks for.
    """
    return lax.dot_general(
        x,
        kernel,
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(x.dtype),
    )


def _product_fwd(
    x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, kernel), (x, kernel)


def _product_bwd(
    operands: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = operands
    dot = functools.partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(x.dtype),
    )
    outputs = tuple(range(1, kernel.ndim))
    rows = tuple(range(x.ndim - 1))
    dy = dy.astype(x.dtype)
    dx = dot(dy, kernel, ((tuple(i + x.ndim - 2 for i in outputs), outputs), ((), ())))
    dw = dot(x, dy, ((rows, rows), ((), ())))
    return dx.astype(x.dtype), dw.astype(kernel.dtype)


product.defvjp(_product_fwd, _product_bwd)


class Linear(nn.Module):
    """y = x W (+ b), kernel [in, out]; computed in `dtype`, accumulated in float32 or wider."""

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32
    # 0: a plain kernel. n: outputs grouped per tensor shard, kernel [in, n, features // n].
    shards: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (
            (self.shards, self.features // self.shards) if self.shards else (self.features,)
        )
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=0)
        kernel = self.param("kernel", init, (x.shape[-1], *width)).astype(self.dtype)
        y = product(x.astype(self.dtype), kernel)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, width)
            y = y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)
        return y.astype(self.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, the mean square taken in float32 or wider."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(at_least_f32(self.dtype))
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return jnp.broadcast_to(scale.astype(self.dtype), x.shape) * wide.astype(self.dtype)


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Rotation per position of each of the H/2 planes, [H/2] float64.

    "linear" divides all by the factor. "llama3" divides the slow ones, keeps the fast ones and
    interpolates between, by how many turns a plane makes in the original context length.
    """
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequency = config.rope_theta**-half
    if config.rope_scaling == "none":
        return frequency
    if config.rope_scaling == "linear":
        return frequency / config.rope_factor
    if config.rope_scaling == "llama3":
        turns = config.rope_original_max_position * frequency / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequency * keep + frequency / config.rope_factor * (1 - keep)
    raise ValueError(f"unknown rope_scaling {config.rope_scaling!r}")


def rope_tables(
    config: LlamaConfig, positions_BT: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, each [B, T, 1, H] (both halves alike)."""
    wide = at_least_f32(dtype)
    frequency = jnp.asarray(np.tile(rope_frequencies(config), 2), wide)
    angle = positions_BT.astype(wide)[..., None, None] * frequency[None, None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """Rotary position embedding; plane i pairs components i and i + H/2."""
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    swapped = jnp.concatenate([-second, first], axis=-1)
    wide = x_BTNH.astype(cos_BT1H.dtype)
    return (wide * cos_BT1H + swapped.astype(cos_BT1H.dtype) * sin_BT1H).astype(
        x_BTNH.dtype
    )


def attend(
    q_BTNH: jax.Array, k_BGSH: jax.Array, v_BGSH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
    """Grouped-query attention of T queries over S slots; softmax in float32 or wider.

    The N // G query heads of a group are folded into the query rows, so that keys and values
    are read once per group.

    Returns: [B, T, N * H].
    """
    B, T, N, H = q_BTNH.shape
    G, S = k_BGSH.shape[1], k_BGSH.shape[2]
    R = N // G
    wide = at_least_f32(q_BTNH.dtype)
    # Scaling the queries instead of the scores saves a pass over [.., T, S].
    q_BTNH = (q_BTNH.astype(wide) * H**-0.5).astype(q_BTNH.dtype)
    q_BGQH = q_BTNH.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4).reshape(B, G, T * R, H)
    score_BGQS = lax.dot_general(
        q_BGQH,
        k_BGSH.astype(q_BTNH.dtype),
        (((3,), (3,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    )
    score = score_BGQS.reshape(B, G, T, R, S)
    score = jnp.where(mask_BTS[:, None, :, None, :], score, jnp.finfo(wide).min)
    weight = jax.nn.softmax(score, axis=-1).astype(q_BTNH.dtype)
    out_BGQH = lax.dot_general(
        weight.reshape(B, G, T * R, S),
        v_BGSH.astype(q_BTNH.dtype),
        (((3,), (2,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide,
    ).astype(q_BTNH.dtype)
    return out_BGQH.reshape(B, G, T, R, H).transpose(0, 2, 1, 3, 4).reshape(B, T, N * H)


def attend_one(
    q_B1NH: jax.Array,
    new: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    start_B: jax.Array,
    mask_B1S: jax.Array,
) -> jax.Array:
    """`attend` for one new token per row, whose key and value are not in the cache yet.

    Reading them from the cache that they are written to makes XLA write every cache twice and
    copy it twice on a CPU, whole: with the text, that soon costs more than the weights.

    Args:
      new: key and value of the new token, each [B, G, 1, H]; they belong to slot `start_B`.
      cache: keys and values [B, G, S, H] without them.

    Returns: [B, 1, N * H].
    """
    B, _, N, H = q_B1NH.shape
    G, S = cache[0].shape[1], cache[0].shape[2]
    dtype, wide = q_B1NH.dtype, at_least_f32(q_B1NH.dtype)
    dot = functools.partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    q_BGRH = (q_B1NH.astype(wide) * H**-0.5).astype(dtype).reshape(B, G, N // G, H)
    k_BGSH, v_BGSH = (x.astype(dtype) for x in cache)
    k_BG1H, v_BG1H = (x.astype(dtype) for x in new)
    score_BGRS = dot(q_BGRH, k_BGSH, (((3,), (3,)), ((0, 1), (0, 1))))
    own_BGR1 = dot(q_BGRH, k_BG1H, (((3,), (3,)), ((0, 1), (0, 1))))
    own_B11S = (jnp.arange(S)[None, :] == start_B[:, None])[:, None, None, :]
    score_BGRS = jnp.where(own_B11S, own_BGR1, score_BGRS)
    score_BGRS = jnp.where(mask_B1S[:, None], score_BGRS, jnp.finfo(wide).min)
    weight_BGRS = jax.nn.softmax(score_BGRS, axis=-1)
    own_weight_BGR1 = jnp.sum(jnp.where(own_B11S, weight_BGRS, 0), axis=-1, keepdims=True)
    weight_BGRS = jnp.where(own_B11S, 0, weight_BGRS)
    out_BGRH = dot(weight_BGRS.astype(dtype), v_BGSH, (((3,), (2,)), ((0, 1), (0, 1))))
    out_BGRH += own_weight_BGR1 * v_BG1H.astype(wide)
    return out_BGRH.astype(dtype).reshape(B, 1, N * H)


def attend_causal(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, mask_BTT: jax.Array
) -> jax.Array:
    """`attend` for whole rows under a mask that hides all later tokens: [B, T, N * H].

    Blocks of queries look only at the keys up to their own end, which halves the work, and the
    weights are divided by their sum after the product with the values, not before (2.6 times as
    fast as `attend` on two CPU cores at T = 512, forward and backward).
    """
    B, T, N, H = q_BTNH.shape
    G, R = k_BGTH.shape[1], N // k_BGTH.shape[1]
    dtype, wide = q_BTNH.dtype, at_least_f32(q_BTNH.dtype)
    block = max(64, -(-T // 8))
    dot = functools.partial(
        lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=wide
    )
    q_BGTRH = q_BTNH.reshape(B, T, G, R, H).transpose(0, 2, 1, 3, 4)
    outs = []
    for begin in range(0, T, block):
        end = min(begin + block, T)
        Q = (end - begin) * R
        q_BGQH = q_BGTRH[:, :, begin:end].reshape(B, G, Q, H)
        score = dot(q_BGQH, k_BGTH[:, :, :end], (((3,), (3,)), ((0, 1), (0, 1))))
        score = score.reshape(B, G, end - begin, R, end) * (H**-0.5)
        visible = mask_BTT[:, None, begin:end, None, :end]
        score = jnp.where(visible, score, jnp.finfo(wide).min)
        top = lax.stop_gradient(jnp.max(score, axis=-1, keepdims=True))
        weight = jnp.exp(score - top)
        total = jnp.sum(weight, axis=-1).reshape(B, G, Q, 1)
        weight = weight.astype(dtype).reshape(B, G, Q, end)
        out = dot(weight, v_BGTH[:, :, :end], (((3,), (2,)), ((0, 1), (0, 1))))
        outs.append((out / total).astype(dtype).reshape(B, G, end - begin, R, H))
    out_BGTRH = jnp.concatenate(outs, axis=2)
    return out_BGTRH.transpose(0, 2, 1, 3, 4).reshape(B, T, N * H)


class Attention(nn.Module):
    """Self-attention; the caller passes the rotation, the mask and (decoding) the cache."""

    config: LlamaConfig
    dtype: Any
    shards: int

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask_BTS: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None = None,
        start_B: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        B, T, _ = x_BTD.shape
        sizes = [
            c.n_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
            c.n_kv_heads * c.head_dim,
        ]
        if self.shards:
            fused = Linear(sum(sizes), c.qkv_bias, self.dtype, self.shards, name="qkv_proj")
            cuts = np.cumsum(sizes)[:2] // self.shards
            q, k, v = jnp.split(fused(x_BTD), cuts, axis=-1)
        else:
            q, k, v = (
                Linear(size, c.qkv_bias, self.dtype, name=name)(x_BTD)
                for size, name in zip(sizes, ("q_proj", "k_proj", "v_proj"))
            )
        q_BTNH = q.reshape(B, T, c.n_heads, c.head_dim)
        k_BTGH = k.reshape(B, T, c.n_kv_heads, c.head_dim)
        v_BTGH = v.reshape(B, T, c.n_kv_heads, c.head_dim)
        if c.qk_norm:
            q_BTNH = RMSNorm(c.rms_eps, self.dtype, name="q_norm")(q_BTNH)
            k_BTGH = RMSNorm(c.rms_eps, self.dtype, name="k_norm")(k_BTGH)
        q_BTNH = rotate(q_BTNH, *rope)
        k_BGTH = rotate(k_BTGH, *rope).transpose(0, 2, 1, 3)
        v_BGTH = v_BTGH.transpose(0, 2, 1, 3)
        if cache is not None:
            assert start_B is not None
            before, new = cache, (k_BGTH, v_BGTH)
            if T == 1:
                out_BTD = attend_one(q_BTNH, new, before, start_B, mask_BTS)
                # Written after it was read, the cache changes in place instead of being copied
                # whole; XLA keeps that order only if what is written depends on what was read.
                nothing_B111 = (out_BTD[:, 0, 0] * 0).astype(k_BGTH.dtype)[
                    :, None, None, None
                ]
                new = (k_BGTH + nothing_B111, v_BGTH + nothing_B111)
            cache = (
                write_rows(before[0], new[0], start_B),
                write_rows(before[1], new[1], start_B),
            )
            if T > 1:
                out_BTD = attend(q_BTNH, *cache, mask_BTS)
        else:
            out_BTD = attend_causal(q_BTNH, k_BGTH, v_BGTH, mask_BTS)
        return Linear(c.d_model, c.out_bias, self.dtype, name="o_proj")(out_BTD), cache


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    config: LlamaConfig
    dtype: Any
    shards: int

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        c = self.config
        if self.shards:
            fused = Linear(
                2 * c.d_ff, c.mlp_bias, self.dtype, self.shards, name="gate_up_proj"
            )
            gate, up = jnp.split(fused(x_BTD), 2, axis=-1)
        else:
            gate = Linear(c.d_ff, c.mlp_bias, self.dtype, name="gate_proj")(x_BTD)
            up = Linear(c.d_ff, c.mlp_bias, self.dtype, name="up_proj")(x_BTD)
        inner = (nn.silu(gate) * up).reshape(*x_BTD.shape[:-1], c.d_ff)
        return Linear(c.d_model, c.mlp_bias, self.dtype, name="down_proj")(inner)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    config: LlamaConfig
    dtype: Any
    shards: int = 0

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask_BTS: jax.Array,
        cache: tuple[jax.Array, jax.Array] | None = None,
        start_B: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
        c = self.config
        normed = RMSNorm(c.rms_eps, self.dtype, name="input_layernorm")(x_BTD)
        attention = Attention(c, self.dtype, self.shards, name="self_attn")
        out, cache = attention(normed, rope, mask_BTS, cache, start_B)
        x_BTD = x_BTD + out
        normed = RMSNorm(c.rms_eps, self.dtype, name="post_attention_layernorm")(x_BTD)
        return x_BTD + Mlp(c, self.dtype, self.shards, name="mlp")(normed), cache


class Llama(nn.Module):
    """A Llama-family backbone.

    Attributes:
      config: its shape.
      dtype: what it computes in (parameters may be stored in another type).
      remat: recompute each block's activations in the backward pass.
      shards: 0 for stored (unfused) parameters; n for parameters that `prepare` fused for a
        tensor axis of n devices.
    """

    config: LlamaConfig
    dtype: Any = jnp.float32
    remat: bool = False
    shards: int = 0

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embed_tokens = nn.Embed(
            c.vocab_size, c.d_model, dtype=self.dtype, embedding_init=init
        )
        block = nn.remat(Block) if self.remat else Block
        self.layers = [block(c, self.dtype, self.shards) for _ in range(c.n_layers)]
        self.norm = RMSNorm(c.rms_eps, self.dtype)
        if not c.tie_embeddings:
            self.head = Linear(c.vocab_size, False, self.dtype, name="lm_head")

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids of any shape -> embeddings [..., D]."""
        return self.embed_tokens(tokens)

    def lm_head(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] (after the final norm) -> logits [..., V], float32 or wider."""
        if not self.config.tie_embeddings:
            return self.head(hidden).astype(at_least_f32(self.dtype))
        return lax.dot_general(
            hidden.astype(self.dtype),
            self.embed_tokens.embedding.astype(self.dtype),
            (((hidden.ndim - 1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=at_least_f32(self.dtype),
        )

    def forward(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array
    ) -> jax.Array:
        """Teacher-forced pass over packed rows -> hidden states after the final norm [B, T, D].

        A token sees the earlier tokens of its own segment (and itself). Segment 0 is padding.
        """
        same = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
        row = jnp.arange(tokens_BT.shape[1])
        mask_BTS = same & (row[None, :, None] >= row[None, None, :])
        return self._run(tokens_BT, positions_BT, mask_BTS, positions_BT, None, None)[0]

    def decode(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: KVCache,
        start_B: jax.Array,
        self_mask_TT: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """T tokens per row behind a cached prefix.

        Args:
          tokens_BT, positions_BT: the new tokens; `positions = start + depth`.
          cache: keys and values; slots [0, start) of a row are its text, where slot = position.
          start_B: the first slot to write, T consecutive ones are used.
          self_mask_TT: [t, s] is True where new token t sees new token s (itself included).

        Returns: hidden states after the final norm [B, T, D], and the cache with the new rows.
        """
        T, S = tokens_BT.shape[1], cache.slots
        slot_S = jnp.arange(S)
        offset_BS = slot_S[None, :] - start_B[:, None]
        # Column of each slot in the new tokens' own mask; slots outside it are clipped away.
        inside_BS = (offset_BS >= 0) & (offset_BS < T)
        own_BTS = jnp.take(self_mask_TT, jnp.clip(offset_BS, 0, T - 1), axis=1)
        own_BTS = jnp.moveaxis(own_BTS, 0, 1) & inside_BS[:, None, :]
        mask_BTS = (offset_BS < 0)[:, None, :] | own_BTS
        key_position_BS = jnp.broadcast_to(slot_S[None, :], offset_BS.shape)
        if self.config.sliding_window:
            # A tree node's position is its depth behind the prefix, not its slot.
            own_position = jnp.take_along_axis(
                positions_BT, jnp.clip(offset_BS, 0, T - 1), axis=1
            )
            key_position_BS = jnp.where(inside_BS, own_position, key_position_BS)
        hidden_BTD, layers = self._run(
            tokens_BT, positions_BT, mask_BTS, key_position_BS, cache, start_B
        )
        return hidden_BTD, KVCache(layers=tuple(layers))

    def _run(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        mask_BTS: jax.Array,
        key_position_BS: jax.Array,
        cache: KVCache | None,
        start_B: jax.Array | None,
    ) -> tuple[jax.Array, list[Any]]:
        c = self.config
        rope = rope_tables(c, positions_BT, self.dtype)
        windowed_BTS = mask_BTS
        if c.sliding_window:
            oldest_BT = positions_BT - c.sliding_window
            windowed_BTS = mask_BTS & (key_position_BS[:, None, :] > oldest_BT[:, :, None])
        x_BTD = self.embed_tokens(tokens_BT)
        layers = []
        for i, block in enumerate(self.layers):
            mask = windowed_BTS if i >= c.sliding_window_start_layer else mask_BTS
            layer_cache = cache.layers[i] if cache is not None else None
            x_BTD, layer_cache = block(x_BTD, rope, mask, layer_cache, start_B)
            layers.append(layer_cache)
        return self.norm(x_BTD), layers


def init_params(
    config: LlamaConfig, key: jax.Array, param_dtype: Any = jnp.float32
) -> Params:
    """Random parameters: embedding N(0, 0.02), kernels N(0, 1/fan_in)."""

    def touch_all(module: Llama) -> jax.Array:
        one = jnp.ones((1, 1), jnp.int32)
        return module.lm_head(module.forward(one, one, one))

    params = Llama(config).init(key, method=touch_all)["params"]
    return jax.tree.map(lambda x: x.astype(param_dtype), params)


def prepare(params: Params, config: LlamaConfig, dtype: Any, shards: int = 1) -> Params:
    """Parameters for decoding: cast to `dtype`, q/k/v and gate/up fused into one kernel each.

    A tied LM head becomes a kernel of its own [D, V]: matrix products over rows of the
    embedding are up to three times slower on a CPU, and the step reads it once either way.
    Decode with `decoding_config(config)`, which says so.

    Fusing is per tensor shard: with 2 shards the fused outputs are [q0 k0 v0 | q1 k1 v1], so
    that splitting the fused kernel over devices splits each of its parts the same way.
    Use with `Llama(decoding_config(config), dtype, shards=shards)`.
    """

    def fuse(parts: list[Params]) -> Params:
        fused = {}
        for leaf in parts[0]:
            grouped = [p[leaf].reshape(*p[leaf].shape[:-1], shards, -1) for p in parts]
            fused[leaf] = jnp.concatenate(grouped, axis=-1)
        return fused

    out = dict(params)
    for i in range(config.n_layers):
        layer = dict(params[f"layers_{i}"])
        attention, mlp = dict(layer["self_attn"]), dict(layer["mlp"])
        qkv = [attention.pop(name) for name in ("q_proj", "k_proj", "v_proj")]
        attention["qkv_proj"] = fuse(qkv)
        mlp["gate_up_proj"] = fuse([mlp.pop("gate_proj"), mlp.pop("up_proj")])
        out[f"layers_{i}"] = layer | {"self_attn": attention, "mlp": mlp}
    if config.tie_embeddings:
        out["lm_head"] = {"kernel": params["embed_tokens"]["embedding"].T}
    return jax.tree.map(lambda x: x.astype(dtype), out)


def decoding_config(config: LlamaConfig) -> LlamaConfig:
    """The shape of the parameters that `prepare` returns: no tied LM head."""
    return dataclasses.replace(config, tie_embeddings=False)
