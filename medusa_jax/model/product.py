"""The product of activations and kernels, and the precision that it is accumulated in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


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


# Kernels in tiles, for decoding on one CPU device. With a kernel [in, out] XLA's library products
# pack what they read before they use it, and its matrix-vector product walks over all columns at
# once; narrow tiles, each contiguous, are read once, by few rows as fast as by one.

TILE = 64
# With so many rows a product over all columns is faster, the tiles put together first.
MANY_ROWS = 32


def tile_kernels(params: Any) -> Any:
    """Parameters with each `kernel` [in, ...] as `tiles` [outputs / TILE, in, TILE], and so the
    factors `down` and `up` of low-rank LM heads as `down_tiles` and `up_tiles`.

    Those whose number of outputs is no multiple of TILE stay as they are.
    """
    if not isinstance(params, dict):
        return params
    out = {name: tile_kernels(value) for name, value in params.items()}
    for name, tiles in (("kernel", "tiles"), ("down", "down_tiles"), ("up", "up_tiles")):
        kernel = out.get(name)
        if kernel is not None and (kernel.size // kernel.shape[0]) % TILE == 0:
            out[tiles] = out.pop(name).reshape(kernel.shape[0], -1, TILE).swapaxes(0, 1)
    return out


def tiled_product(x: jax.Array, tiles: jax.Array) -> jax.Array:
    """x [..., in] times a kernel in tiles [n, in, TILE] -> [..., n TILE], as `product`."""
    n, size, _ = tiles.shape
    x_RI = x.reshape(-1, size)
    R = x_RI.shape[0]
    if R >= MANY_ROWS:
        return product(x, tiles.swapaxes(0, 1).reshape(size, -1))
    if R == 1:  # twice: XLA would take its matrix-vector product, which is slower
        x_RI = jnp.concatenate([x_RI, x_RI])
    y_nRO = lax.dot_general(
        jnp.broadcast_to(x_RI[None], (n, *x_RI.shape)),
        tiles,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(x.dtype),
    )
    return y_nRO[:, :R].swapaxes(0, 1).reshape(*x.shape[:-1], -1)
