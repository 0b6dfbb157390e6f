"""Calls of the kernels: a whole layer over few new tokens after a cached text, and single operations."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.arch import MLP_ACTIVATIONS, LlamaConfig
from medusa_jax.cpu.panels import FORMS, Panels, floats
from medusa_jax.model.cache import Pair
from medusa_jax.model.layers import mlp_norm
from medusa_jax.model.masks import LayerMask, PathMask

LINEARS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
# Norms of the outputs of attention and MLP.
OUT_NORMS = "post_attention_layernorm", "post_feedforward_layernorm"


def layer(
    config: LlamaConfig,
    params: Mapping[str, Any],
    x_BTD: jax.Array,
    rope: Pair,
    mask: LayerMask,
    cache: Pair,
    start_B: jax.Array,
    input_BTI: jax.Array | None = None,
) -> tuple[jax.Array, Pair]:
    """x + attention(norm(x)), then this + mlp(norm(this)), in float32: as `DecoderLayer`.

    One call per layer keeps the threads awake and the memory busy, which about ten operations would not.

    All sums have a fixed order. Sums over the text follow its positions, whether a position is in the
    cache or among the new tokens. Therefore a token's result is the same, bit for bit, as a node
    of a tree and in plain decoding, in a batch and alone.

    Args:
      params: the layer's, with its kernels in `Panels`.
      rope: cos and sin of the tokens' angles, [B, T, 1, H].
      cache: keys and values [B, G, S, H]. The new ones are written to the slots from `start` on, in place if
        nothing else needs the old cache. If a path has more than T rows, earlier nodes lie before them.
      input_BTI: what attention reads; None: the norm of x.

    Returns: the rows [B, T, D], and the cache with their keys and values.
    """
    attention = params["self_attn"]
    names = ((room, name) for room, all_names in LINEARS.items() for name in all_names)
    linears = [params[room][name] for room, name in names if name in params[room]]
    kernels: list[Panels] = [linear["kernel"] for linear in linears]
    if input_BTI is None and not config.pre_norm:
        input_BTI = x_BTD
    input_norm = params["input_layernorm"] if input_BTI is None else None
    norms = [input_norm, params[mlp_norm(config)] if config.pre_norm else None]
    norms += [attention.get("q_norm"), attention.get("k_norm")]
    out_norms = [params[name] for name in OUT_NORMS] if config.post_norm else []
    # The kernel takes a text as a path without rows, and all of its tokens as no counts.
    path_TR, count_B = jnp.ones((x_BTD.shape[1], 0), bool), jnp.zeros((0,), jnp.int32)
    if isinstance(mask, PathMask):
        path_TR = mask.mask_TR.astype(bool)
    elif mask.count_B is not None:
        count_B = mask.count_B.astype(jnp.int32)
    results = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (x_BTD, *cache)]
    call = jax.ffi.ffi_call("medusa_layer", results, input_output_aliases={5: 1, 6: 2})
    y_BTD, keys_BGSH, values_BGSH = call(
        x_BTD.astype(jnp.float32), *rope, start_B.astype(jnp.int32),
        path_TR, *cache, floats(input_BTI),
        *(floats(norm and norm["scale"]) for norm in norms),
        count_B,
        *(
            operand
            for linear, k in zip(linears, kernels)
            for operand in (k.panels, floats(k.scales), floats(linear.get("bias")))
        ),
        *(floats(norm["scale"]) for norm in out_norms),
        n_heads=np.int64(config.n_heads), d_ff=np.int64(config.d_ff),
        window=np.int64(mask.window), forms=np.array([FORMS[k.form] for k in kernels], np.int64),
        activations=np.int64(kernels[0].activations), eps=np.float64(config.rms_eps),
        residual_multiplier=np.float64(config.residual_multiplier),
        query_multiplier=np.float64(config.query_multiplier), late_norms=np.int64(config.qk_norm_late),
        activation=np.int64(MLP_ACTIVATIONS.index(config.activation)),
    )  # fmt: skip
    return y_BTD, (keys_BGSH, values_BGSH)


def commit(
    caches: list[jax.Array], start_B: jax.Array, path_BL: jax.Array
) -> list[jax.Array]:
    """`Kernels.commit` of all keys and values at once, each [B, G, S, H] float32, in place."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in caches]
    aliases = {2 + i: i for i in range(len(caches))}
    call = jax.ffi.ffi_call("medusa_commit", shapes, input_output_aliases=aliases)
    return list(call(start_B.astype(jnp.int32), path_BL.astype(jnp.int32), *caches))


def norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / rms(x) * scale in float32; XLA's order of summing depends on the number of rows."""
    call = jax.ffi.ffi_call("medusa_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x.astype(jnp.float32), scale_D.astype(jnp.float32), eps=np.float64(eps))


def rotate(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """`Kernels.rotate` in float32. XLA fuses a product and a sum into one rounding in some
    programs and not in others."""
    shape = jax.ShapeDtypeStruct(x_BTNH.shape, jnp.float32)
    return jax.ffi.ffi_call("medusa_rotate", shape)(x_BTNH, cos_BT1H, sin_BT1H)


def best_token(scores: jax.Array) -> jax.Array:
    """`Kernels.best_token` in float32; XLA would compile some ten kernels for each call."""
    call = jax.ffi.ffi_call(
        "medusa_best", jax.ShapeDtypeStruct(scores.shape[:-1], jnp.int32)
    )
    return call(scores)
