"""An order that XLA keeps on every backend."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from medusa_jax.sharding import PyTree, param_shardings


def not_before(tree: PyTree, done: jax.Array) -> PyTree:
    """`tree` as it is, but not to be had before `done`, any array, is worked out.

    An optimisation barrier, where the backend keeps one. XLA for CPU drops it, and then begins
    early with what reads `tree`, which keeps large temporaries alive for nothing; there, zero
    times an element of `done` is added instead, which it must not simplify, because a NaN would
    stay one.
    """

    def add_nothing(tree: PyTree, done: jax.Array) -> PyTree:
        zero = done[(0,) * done.ndim].astype(jnp.float32) * 0
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), tree)

    def barrier(tree: PyTree, done: jax.Array) -> PyTree:
        return lax.optimization_barrier((tree, done))[0]

    return lax.platform_dependent(tree, done, cpu=add_nothing, default=barrier)


def behind(x: jax.Array, made: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """`x` and what else is made, `x` not to be had before the others, nor made again from its parts.

    XLA for CPU drops a barrier, and what `not_before` adds there it fuses into whatever reads x,
    which then keeps all that x is a sum of; a branch it neither drops nor fuses.
    """

    def branch(x: jax.Array, made: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        done = one_of_all(made)
        return lax.cond(done == done, lambda x: x, lambda x: x * jnp.nan, x), made

    def barrier(x: jax.Array, made: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        return lax.optimization_barrier((x, made))

    return lax.platform_dependent(x, made, cpu=branch, default=barrier)


def gathered_anew(weights: PyTree, done: jax.Array, mesh: Mesh | None) -> PyTree:
    """`weights` for a further pass, gathered over fsdp behind `done` and not before.

    XLA gathers an array once however many passes read it: between two passes the gathered kernels
    of all layers would stay on every device (Vicuna-33B: 65 GB).
    """
    if mesh is None or mesh.shape["fsdp"] == 1:
        return weights
    weights = not_before(weights, done)
    # Placed again, or XLA gathers first and adds what ties them behind it.
    return lax.with_sharding_constraint(weights, param_shardings(mesh, weights))


def one_of_all(*trees: PyTree) -> jax.Array:
    """A number that is worked out when all arrays of the trees are: a `done` for `not_before`."""
    firsts = [x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(trees)]
    return jnp.sum(jnp.stack(firsts))
