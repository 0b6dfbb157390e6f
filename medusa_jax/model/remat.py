"""Recomputation in the backward pass that holds on every backend."""

from collections.abc import Callable

import jax

from medusa_jax.model.barrier import not_before
from medusa_jax.sharding import PyTree


def rematerialised(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """f, whose backward pass keeps its arguments only and computes f again from them.

    `jax.checkpoint` does the same with barriers, so that on a CPU, which drops them, every
    layer's activations are recomputed before the first of them is needed: nothing is saved.

    Args:
      f: arrays or trees of arrays -> one array; it must not close over traced values.
    """

    @jax.custom_vjp
    def again(*args: PyTree) -> jax.Array:
        return f(*args)

    def forward(*args: PyTree) -> tuple[jax.Array, tuple[PyTree, ...]]:
        return f(*args), args

    def backward(args: tuple[PyTree, ...], cotangent: jax.Array) -> tuple[PyTree, ...]:
        return jax.vjp(f, *not_before(args, cotangent))[1](cotangent)

    again.defvjp(forward, backward)
    return again
