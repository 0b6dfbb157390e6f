"""Recomputation in the backward pass that holds on every backend."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any


def after(tree: Tree, done: jax.Array) -> Tree:
    """`tree` as it is, but not to be had before `done`, a scalar, is worked out.

    An optimisation barrier, where the backend keeps one. XLA for CPU drops it, and then begins
    early with what reads `tree`, which keeps large temporaries alive for nothing; there, zero
    times the scalar is added instead, which it must not simplify, because a NaN would stay one.
    """

    def add_nothing(tree: Tree, done: jax.Array) -> Tree:
        zero = done * 0
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)

    def barrier(tree: Tree, done: jax.Array) -> Tree:
        return lax.optimization_barrier((tree, done))[0]

    return lax.platform_dependent(tree, done, cpu=add_nothing, default=barrier)


def rematerialised(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """f, whose backward pass keeps its arguments only and computes f again from them.

    `jax.checkpoint` does the same with barriers, so that on a CPU, which drops them, every
    layer's activations are recomputed before the first of them is needed: nothing is saved.

    Args:
      f: arrays or trees of arrays -> one array; it must not close over traced values.
    """

    @jax.custom_vjp
    def again(*args: Tree) -> jax.Array:
        return f(*args)

    def forward(*args: Tree) -> tuple[jax.Array, tuple[Tree, ...]]:
        return f(*args), args

    def backward(args: tuple[Tree, ...], cotangent: jax.Array) -> tuple[Tree, ...]:
        one = cotangent[(0,) * cotangent.ndim].astype(jnp.float32)
        return jax.vjp(f, *after(args, one))[1](cotangent)

    again.defvjp(forward, backward)
    return again
