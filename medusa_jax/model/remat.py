"""Recomputation in the backward pass that holds on every backend."""

from collections.abc import Callable
from typing import Any

import jax

from medusa_jax.model.barrier import behind, not_before
from medusa_jax.sharding import PyTree


def rematerialised(f: Callable[..., jax.Array], trained: str) -> Callable[..., jax.Array]:
    """f, whose backward pass keeps its arguments only and computes f again from them.

    `jax.checkpoint` does the same with barriers, so that on a CPU, which drops them, every
    layer's activations are recomputed before the first of them is needed: nothing is saved.

    The gradient of x is had behind those of what is trained: else they may be left for later, and
    what they are made of is kept for each layer, several times x.

    Args:
      f: (variables, x, ...), arrays or trees of arrays -> one array; it must not close over traced
        values.
      trained: the entry of `variables` whose gradients are wanted; nobody waits for the others'.
    """

    @jax.custom_vjp
    def again(variables: PyTree, x: jax.Array, *rest: Any) -> jax.Array:
        return f(variables, x, *rest)

    def forward(*args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        return f(*args), args

    def backward(args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
        given = jax.vjp(f, *not_before(args, cotangent))[1](cotangent)
        of_variables, of_x, *rest = given
        leaves, treedef = jax.tree.flatten(of_variables[trained])
        numbers = [i for i, g in enumerate(leaves) if g.dtype != jax.dtypes.float0]
        of_x, wanted = behind(of_x, [leaves[i] for i in numbers])
        for i, gradient in zip(numbers, wanted):
            leaves[i] = gradient
        made = of_variables | {trained: jax.tree.unflatten(treedef, leaves)}
        return (made, of_x, *rest)

    again.defvjp(forward, backward)
    return again
