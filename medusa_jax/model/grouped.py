"""Grouped-query attention in products: the query heads of a group are rows of one product with its keys."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.devices.platforms import platform
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.seams import Pair


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(a: jax.Array, b: jax.Array, axis_b: int) -> jax.Array:
    """The last axis of a [B, G, Q, X] times axis 2 or 3 of b, batched over [B, G], in float32 or wider.

    Its gradient is rounded to their type before it is multiplied.
    """
    return _dot(a, b, 3, axis_b)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((0, 1), (0, 1))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=at_least_f32(a.dtype),
    )


def _dot_backward(axis_b: int, given: Pair, d: jax.Array) -> Pair:
    a, b = given
    d = d.astype(a.dtype)
    d_b = _dot(d, a, 2, 2) if axis_b == 3 else _dot(a, d, 2, 2)
    return _dot(d, b, 3, 5 - axis_b).astype(a.dtype), d_b.astype(b.dtype)


dot.defvjp(lambda a, b, axis_b: (dot(a, b, axis_b), (a, b)), _dot_backward)


def products(q_BGQH: jax.Array, k_BGSH: jax.Array) -> jax.Array:
    """Products of queries with the keys of a cache, in the order of the platform: [B, G, Q, S].

    A CPU takes keys times queries, since otherwise it transposes all keys first. A GPU takes queries times
    keys: a softmax across rows of memory is three more kernels in each layer.
    """
    if platform() == "cpu":
        return jnp.swapaxes(dot(k_BGSH, q_BGQH, 3), 2, 3)
    return dot(q_BGQH, k_BGSH, 3)


def fold_queries(x_BGTRX: jax.Array) -> jax.Array:
    """The queries of a group as rows: [B, G, T * R, X]."""
    return x_BGTRX.reshape(*x_BGTRX.shape[:2], -1, x_BGTRX.shape[-1])


def group_queries(q_BTNH: jax.Array, G: int) -> jax.Array:
    """Group queries by their key/value head: [B, G, T, R, H]."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 1, 3, 4)


def flat(out_BGTRH: jax.Array) -> jax.Array:
    """[B, G, T, R, H] -> [B, T, N * H]."""
    B, _, T = out_BGTRH.shape[:3]
    return out_BGTRH.transpose(0, 2, 1, 3, 4).reshape(B, T, -1)
