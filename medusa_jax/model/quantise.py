"""Frozen kernels in 8 or 4 bits, dequantised inside the product that uses them.

A kernel [in, out] becomes `codes` and `scales` [blocks, out], one scale per block of inputs and output:

    int8    codes int8 [in, out], one block (a scale per output), code / 127 x scale
    nf4     codes uint8 [in / 2, out], two 4-bit codes to a byte, blocks of 64 inputs,
            table[code] x scale (QLoRA, Dettmers et al. 2023, appendix E): 0.53 bytes per weight

Two codes are packed by hand because JAX stores each int4 in a whole byte on a CPU.
"""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from medusa_jax.model.barrier import depend_on
from medusa_jax.model.product import product
from medusa_jax.model.stored import int8_codes
from medusa_jax.sharding import Params

BLOCK = 64
# The kernels of all layers; embeddings and the LM head are unchanged, as in QLoRA.
QUANTISED = re.compile(r"layers_\d+/.*/kernel$")

# Quantiles of N(0, 1), scaled to [-1, 1], with an exact zero.
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip


def quantise(kernel: jax.Array, kind: str) -> Params:
    """A kernel [in, out] -> {"codes", "scales"}; codes are nearest, scales bfloat16 for nf4."""
    if kind == "int8":
        codes, scales = int8_codes(kernel)
        return {"codes": codes, "scales": scales}
    n_in, n_out = kernel.shape
    wide = kernel.astype(jnp.float32)
    block = math.gcd(n_in, BLOCK)
    blocks = wide.reshape(n_in // block, block, n_out)
    scales = jnp.max(jnp.abs(blocks), axis=1).astype(jnp.bfloat16)
    scales = jnp.maximum(scales, jnp.bfloat16(1e-30))
    unit = blocks / scales[:, None, :].astype(jnp.float32)
    # The nearest code equals the number of midpoints of neighbouring levels below the value.
    codes = jnp.zeros(unit.shape, jnp.uint8)
    for midpoint in ((NF4[1:] + NF4[:-1]) / 2).tolist():
        codes += (unit > midpoint).astype(jnp.uint8)
    codes = codes.reshape(n_in // 2, 2, n_out)
    return {"codes": codes[:, 0] | (codes[:, 1] << 4), "scales": scales}


def dequantise(codes: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Codes and scales -> the kernel [in, out] in `dtype`.

    nf4 packs along the inputs: rows 0 and 1 are the low and high nibbles of byte row 0.
    """
    if codes.dtype == jnp.int8:
        unit = codes.astype(jnp.float32) / 127
    else:
        low_high = jnp.stack([codes & 15, codes >> 4], axis=1)
        unit = jnp.take(jnp.asarray(NF4), low_high.reshape(-1, codes.shape[1]), axis=0)
    blocks = unit.reshape(scales.shape[0], -1, scales.shape[1])
    wide = blocks * scales[:, None, :].astype(jnp.float32)
    return wide.reshape(unit.shape).astype(dtype)


@jax.custom_vjp
def quantised_product(x: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
    """x [..., in] times the kernel, accumulated in float32 or wider; gradient for x only.

    Each pass dequantises the kernel again, just before its use; otherwise the float kernels of all layers
    would exist at once.
    """
    return product(x, dequantise(depend_on(codes, x), scales, x.dtype))


def _quantised_fwd(
    x: jax.Array, codes: jax.Array, scales: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    zero = jnp.zeros((), x.dtype)  # residuals must be arrays: this one carries the dtype
    return quantised_product(x, codes, scales), (codes, scales, zero)


def _quantised_bwd(
    residuals: tuple[jax.Array, ...], dy: jax.Array
) -> tuple[jax.Array, None, None]:
    codes, scales, zero = residuals
    dy = dy.astype(zero.dtype)
    kernel = dequantise(depend_on(codes, dy), scales, zero.dtype)
    return product(dy, kernel.T).astype(zero.dtype), None, None


quantised_product.defvjp(_quantised_fwd, _quantised_bwd)


def quantise_backbone(params: Params, kind: str) -> Params:
    """Quantise the kernels of every layer, one at a time."""
    out: Params = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        if QUANTISED.search(path):
            arrays = jax.jit(quantise, static_argnums=1)(leaf, kind)
            out |= {f"{path.removesuffix('kernel')}{name}": x for name, x in arrays.items()}
        else:
            out[path] = leaf
    return unflatten_dict(out, sep="/")  # type: ignore[no-any-return]


def dequantise_backbone(params: Params) -> Params:
    """The inverse of `quantise_backbone`, up to rounding, in float32."""
    if "codes" in params:
        others = {k: v for k, v in params.items() if k not in ("codes", "scales")}
        kernel = dequantise(params["codes"], params["scales"], jnp.float32)
        return others | {"kernel": kernel}
    return {
        name: dequantise_backbone(inner) if isinstance(inner, dict) else inner
        for name, inner in params.items()
    }
