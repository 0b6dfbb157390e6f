"""The product of activations and kernels, and its accumulation type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from medusa_jax.devices.platforms import platform

# XLA for CUDA computes the product of one row as multiplications and a sum, which leaves an H100's memory idle
# for up to two thirds of the time. A matrix product of 8 rows in 16 bits is faster: research/log/.
CUDA_ROWS = 8


def at_least_f32(dtype: DTypeLike) -> np.dtype:
    """float32 for 16-bit types, else the type itself; norms and softmax are computed in it."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x [..., in] times kernel [in, ...], accumulated in float32 or wider.

    Automatic differentiation computes dW as (dyᵀ x)ᵀ, which takes a CPU nearly twice as long as the
    rule below, xᵀ dy.
    """

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(
            x,
            kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=at_least_f32(x.dtype),
        )

    measured = platform() == "cuda" and x.dtype in (jnp.bfloat16, jnp.float16)
    if x.size > x.shape[-1] or not measured:
        return dot(x, kernel)
    rows = jnp.pad(x.reshape(1, -1), ((0, CUDA_ROWS - 1), (0, 0)))
    rows = lax.optimization_barrier(rows)  # or XLA would undo it
    return dot(rows, kernel)[:1].reshape(*x.shape[:-1], *kernel.shape[1:])


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
