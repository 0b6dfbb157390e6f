"""Store cached hidden states (`data.cache_features`) in 32, 16 or 8 bits.

"float8" stores the final hidden state and each tapped stream of a position in D + 4 bytes:
one float32 scale, then D values in float8_e4m3fn. Their relative error of 2^-4 also holds
for small values. Residual streams have a few very large values, which would take up the
range of integers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.model.product import at_least_f32

# data.cache_features -> type of the stored array; bfloat16 is stored as its bits.
STORED = {"float32": "float32", "bfloat16": "uint16", "float8": "uint8"}
FLOAT8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FLOAT8).max)


def stored_width(kind: str, D: int, E: int) -> int:
    """Elements per position for hidden states E wide of a backbone D wide."""
    return E // D * (D + 4) if kind == "float8" else E


def encode(kind: str, hidden_BTE: jax.Array, D: int) -> jax.Array:
    """Hidden states as they are stored: [B, T, `stored_width`]."""
    if kind != "float8":
        return hidden_BTE.astype(kind)
    B, T, E = hidden_BTE.shape
    x_BTAD = hidden_BTE.reshape(B, T, E // D, D).astype(jnp.float32)
    top_BTA1 = jnp.max(jnp.abs(x_BTAD), axis=-1, keepdims=True)
    scale_BTA1 = jnp.where(top_BTA1 > 0, top_BTA1 / LARGEST, 1.0)
    codes = lax.bitcast_convert_type((x_BTAD / scale_BTA1).astype(FLOAT8), jnp.uint8)
    scales = lax.bitcast_convert_type(scale_BTA1[..., 0], jnp.uint8)  # [B, T, A, 4]
    return jnp.concatenate([scales, codes], axis=-1).reshape(B, T, -1)


def decode(array: jax.Array, D: int, dtype: DTypeLike) -> jax.Array:
    """The hidden states [B, T, E] of a batch."""
    if array.dtype != jnp.uint8:
        return array.astype(dtype)
    B, T, W = array.shape
    bytes_BTAW = array.reshape(B, T, W // (D + 4), D + 4)
    scale_BTA = lax.bitcast_convert_type(bytes_BTAW[..., :4], jnp.float32)
    codes = lax.bitcast_convert_type(bytes_BTAW[..., 4:], FLOAT8)
    values = codes.astype(at_least_f32(dtype)) * scale_BTA[..., None]
    return values.astype(dtype).reshape(B, T, -1)
