"""Norm and rotation of single rows."""

import jax
import jax.numpy as jnp
import numpy as np


def norm(x: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / rms(x) * scale in float32; XLA's order of summing depends on the number of rows."""
    call = jax.ffi.ffi_call("medusa_norm", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x.astype(jnp.float32), scale_D.astype(jnp.float32), eps=np.float64(eps))


def rotate(x_BTNH: jax.Array, cos_BT1H: jax.Array, sin_BT1H: jax.Array) -> jax.Array:
    """`model.rope.rotate` in float32. XLA fuses a product and a sum into one rounding in some
    programs and not in others."""
    B, T, _, H = x_BTNH.shape
    x, cos, sin = (a.reshape(B * T, -1, H) for a in (x_BTNH, cos_BT1H, sin_BT1H))
    call = jax.ffi.ffi_call("medusa_rotate", jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, cos, sin).reshape(x_BTNH.shape)
