"""A layer of the backbone by one call of the kernels of `native`, from the layer's parameters."""

from collections.abc import Mapping
from typing import Any

import jax

from medusa_jax.config import LlamaConfig
from medusa_jax.model.attention import Pair, PathMask
from medusa_jax.native import Kernel, layer_native


def fused_layer(
    config: LlamaConfig,
    layer: Mapping[str, Any],
    x_BTD: jax.Array,
    rope: Pair,
    mask: PathMask,
    cache: Pair,
    start_B: jax.Array,
) -> tuple[jax.Array, Pair]:
    """What `Block` computes; its kernels are `Panels`, fused by `prepare`.

    Between some ten operations a layer, threads fall asleep and memory is idle; within one
    they do not.

    Returns: the rows [B, T, D], and the cache with their keys and values after the text.
    """
    attention, mlp = layer["self_attn"], layer["mlp"]
    norms = [layer["input_layernorm"], layer["post_attention_layernorm"]]
    norms += [attention.get("q_norm"), attention.get("k_norm")]
    linears = [
        attention["qkv_proj"],
        attention["o_proj"],
        mlp["gate_up_proj"],
        mlp["down_proj"],
    ]
    kernels = [linear["kernel"] for linear in linears]
    return layer_native(
        x_BTD,
        rope,
        cache,
        start_B,
        mask.mask_TT,
        [norm and norm["scale"] for norm in norms],
        [
            Kernel(k.panels, k.parts, k.scales, linear.get("bias"))
            for k, linear in zip(kernels, linears)
        ],
        n_heads=config.n_heads,
        d_ff=config.d_ff,
        window=mask.window,
        eps=config.rms_eps,
    )
