"""An order that XLA keeps on every backend."""

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.sharding import PyTree


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


def one_of_all(*trees: PyTree) -> jax.Array:
    """A number that is worked out when all arrays of the trees are: a `done` for `not_before`."""
    firsts = [x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(trees)]
    return jnp.sum(jnp.stack(firsts))
