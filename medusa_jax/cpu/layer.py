"""A layer of the backbone in one call: few new tokens after a cached text, each along its path."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from medusa_jax.arch import LlamaConfig
from medusa_jax.cpu.panels import numbered
from medusa_jax.model.attention import Pair, PathMask


def layer(
    config: LlamaConfig,
    params: Mapping[str, Any],
    x_BTD: jax.Array,
    rope: Pair,
    mask: PathMask,
    cache: Pair,
    start_B: jax.Array,
) -> tuple[jax.Array, Pair]:
    """x + attention(norm(x)), then this + mlp(norm(this)), in float32: `Block`, as `Engine.layer`.

    Between some ten operations a layer, threads fall asleep and memory is idle; within one they do not.

    All sums are computed in a fixed order, those over the text in the order of its
    positions, whether these lie in the cache or among the new tokens. So a token comes out the same,
    bit for bit, as a node of a tree and in plain decoding, in a batch and alone.

    Args:
      params: the layer's, with its kernels in `Panels`, fused by `placing.prepare`.
      rope: cos and sin of the tokens' angles, [B, T, 1, H].
      cache: keys and values [B, G, S, H]; slots [0, start) are the text. Those after it are
        written, in place if nothing else needs the old cache.

    Returns: the rows [B, T, D], and the cache with their keys and values.
    """
    f32, attention, mlp = jnp.float32, params["self_attn"], params["mlp"]
    norms = [params["input_layernorm"], params["post_attention_layernorm"]]
    norms += [attention.get("q_norm"), attention.get("k_norm")]
    linears = [attention["qkv_proj"], attention["o_proj"]]
    linears += [mlp["gate_up_proj"], mlp["down_proj"]]
    kernels = [linear["kernel"] for linear in linears]

    def given(x: jax.Array | None) -> jax.Array:
        return jnp.zeros((0,), f32) if x is None else x.astype(f32).reshape(-1)

    weights = [
        (k.panels, given(k.scales), given(linear.get("bias")))
        for k, linear in zip(kernels, linears)
    ]
    counts = np.array([len(k.parts) for k in kernels], np.int64)
    parts = tuple(part for k in kernels for part in k.parts)
    results = [jax.ShapeDtypeStruct(a.shape, f32) for a in (x_BTD, *cache)]
    call = jax.ffi.ffi_call("medusa_layer", results, input_output_aliases={5: 1, 6: 2})
    y_BTD, keys_BGSH, values_BGSH = call(
        x_BTD.astype(f32), *rope, start_B.astype(jnp.int32), mask.mask_TT.astype(bool), *cache,
        *(given(norm and norm["scale"]) for norm in norms),
        *(operand for kernel in weights for operand in kernel),
        n_heads=np.int64(config.n_heads), d_ff=np.int64(config.d_ff),
        window=np.int64(mask.window), counts=counts,
        **numbered(parts, kernels[0].activations),
        eps=np.float64(config.rms_eps),
    )  # fmt: skip
    return y_BTD, (keys_BGSH, values_BGSH)
