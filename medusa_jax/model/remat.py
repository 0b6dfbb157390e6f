"""Recomputation in the backward pass that holds on every backend."""

from collections.abc import Callable

import jax

from medusa_jax.model.barrier import barrier_with, depend_on
from medusa_jax.sharding import PyTree


def rematerialised(f: Callable[..., jax.Array], trained: str) -> Callable[..., jax.Array]:
    """f with a backward pass that keeps only its arguments and computes f again from them.

    `jax.checkpoint` relies on barriers. A CPU drops them and recomputes the activations of every layer
    before the first is needed, which saves nothing.

    The gradient of x is available only after the gradients of the trained variables: otherwise XLA may
    postpone those and keep what they are computed from for each layer, several times the size of x.

    Args:
      f: (variables, x, ...), arrays or trees of arrays -> one array; it must not close over traced
        values.
      trained: the entry of `variables` whose gradients are needed.
    """

    @jax.custom_vjp
    def recomputed(variables: PyTree, x: jax.Array, *rest: PyTree) -> jax.Array:
        return f(variables, x, *rest)

    def forward(*args: PyTree) -> tuple[jax.Array, tuple[PyTree, ...]]:
        return f(*args), args

    def backward(args: tuple[PyTree, ...], cotangent: jax.Array) -> tuple[PyTree, ...]:
        d_variables, dx, *d_rest = jax.vjp(f, *depend_on(args, cotangent))[1](cotangent)
        leaves, treedef = jax.tree.flatten(d_variables[trained])
        indices = [i for i, g in enumerate(leaves) if g.dtype != jax.dtypes.float0]
        dx, gradients = barrier_with(dx, [leaves[i] for i in indices])
        for i, gradient in zip(indices, gradients):
            leaves[i] = gradient
        d_variables |= {trained: jax.tree.unflatten(treedef, leaves)}
        return (d_variables, dx, *d_rest)

    recomputed.defvjp(forward, backward)
    return recomputed
