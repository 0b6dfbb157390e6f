"""Ordering of computations that XLA keeps on every backend, and recomputation in the backward pass."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from medusa_jax.sharding import PyTree, param_shardings


def depend_on(tree: PyTree, done: jax.Array) -> PyTree:
    """Return `tree` unchanged, but available only once the array `done` is computed.

    An optimisation barrier, except on a CPU: XLA drops barriers there, so operations that read `tree` could
    start early and keep large temporaries alive. There, we add zero times an element of `done`; XLA cannot
    simplify this, because zero times NaN is NaN.
    """

    def add_zero(tree: PyTree, done: jax.Array) -> PyTree:
        zero = done[(0,) * done.ndim].astype(jnp.float32) * 0
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)

    def barrier(tree: PyTree, done: jax.Array) -> PyTree:
        return lax.optimization_barrier((tree, done))[0]

    return lax.platform_dependent(tree, done, cpu=add_zero, default=barrier)


def barrier_with(
    x: jax.Array, others: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Return both arguments unchanged; `x` is available only after `others` and is not recomputed.

    XLA for CPU would fuse the addition of `depend_on` into each reader of `x`, and keep all terms of
    `x` alive. It neither drops nor fuses a branch.
    """

    def branch(x: jax.Array, others: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        done = completion_of(others)
        return lax.cond(done == done, lambda x: x, lambda x: x * jnp.nan, x), others

    def barrier(x: jax.Array, others: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        return lax.optimization_barrier((x, others))

    return lax.platform_dependent(x, others, cpu=branch, default=barrier)


def regather(weights: PyTree, done: jax.Array, mesh: Mesh | None) -> PyTree:
    """Return `weights`, gathered over fsdp again for a further pass, and only after `done`.

    XLA gathers an array once for all passes that read it, which would leave the gathered kernels of all
    layers on every device between two passes (Vicuna-33B: 65 GB).
    """
    if mesh is None or mesh.shape["fsdp"] == 1:
        return weights
    weights = depend_on(weights, done)
    # Without this constraint XLA gathers first and adds the dependence to the gathered array.
    return lax.with_sharding_constraint(weights, param_shardings(mesh, weights))


def completion_of(*trees: PyTree) -> jax.Array:
    """A scalar that exists once every array of the trees is computed: a `done` for `depend_on`."""
    firsts = [x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(trees)]
    return jnp.sum(jnp.stack(firsts))


def rematerialise(f: Callable[..., jax.Array], trained: str) -> Callable[..., jax.Array]:
    """f with a backward pass that keeps only its arguments and computes f again from them.

    `jax.checkpoint` relies on barriers. A CPU drops them and recomputes the activations of every layer
    before the first is needed, which saves nothing.

    The gradient of x is available only after the gradients of the trained variables: otherwise XLA may
    postpone those and keep each layer's operands for them, several times the size of x.

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
