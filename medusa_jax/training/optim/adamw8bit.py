"""AdamW with one byte per moment (Dettmers et al. 2022, "8-bit optimizers").

Moments are quantised by `dynamic_levels.py`, and are float32 only during the update of their leaf.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from medusa_jax.sharding import PyTree
from medusa_jax.training.optim.dynamic_levels import pack, packed_zeros, unpack

# Leaves up to this size are updated together with those of the same shape, larger ones in pieces.
PART = 1 << 22


class Adam8bitState(NamedTuple):
    """Steps made; codes shaped like the parameters (float32 where small); scales of blocks."""

    steps: jax.Array
    mu: PyTree
    nu: PyTree
    mu_scale: PyTree
    nu_scale: PyTree


def in_stacks(f: Callable[..., PyTree], rows: list[PyTree]) -> list[PyTree]:
    """[f(*row) for row in rows], with small arrays of one shape in one call.

    f is elementwise (or works on blocks of the last axis); its arguments are trees of arrays. The compiler
    then sees a few calls instead of hundreds for hundreds of adapters.
    """
    groups: dict[str | int, list[int]] = {}
    for i, row in enumerate(rows):
        key = str(jax.tree.map(jnp.shape, row)) if row[0].size <= PART else i
        groups.setdefault(key, []).append(i)
    out: list[PyTree] = [None] * len(rows)
    for members in groups.values():
        if len(members) == 1:
            out[members[0]] = f(*rows[members[0]])
            continue
        results = f(*jax.tree.map(lambda *x: jnp.stack(x), *(rows[i] for i in members)))
        for j, i in enumerate(members):
            out[i] = jax.tree.map(lambda x, j=j: x[j], results)
    return out


def in_pieces(f: Callable[..., PyTree], *row: PyTree) -> PyTree:
    """f(*row), for large arrays one piece of the rows at a time: [R, ...] -> [R, ...].

    So a whole moment never exists in float32. Piece i takes every P-th row from row i on, so that each piece is
    split over devices like the array.
    """
    shape = jax.tree.leaves(row)[0].shape
    P = 1
    while math.prod(shape) > P * PART and len(shape) > 1 and shape[0] % (2 * P) == 0:
        P *= 2
    if P == 1:
        return f(*row)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] // P, P, *x.shape[1:])

    def join(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *x.shape[2:])

    rows = jax.tree.map(split, row)

    def piece(i: jax.Array | int) -> PyTree:
        return f(*jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, False), rows))

    def body(i: jax.Array, out: PyTree) -> PyTree:
        # Written in place: stacked results would need a transpose, a whole copy.
        return jax.tree.map(
            lambda whole, x: lax.dynamic_update_index_in_dim(whole, x, i, 1), out, piece(i)
        )

    empty = jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], P, *x.shape[1:]), x.dtype),
        jax.eval_shape(piece, 0),
    )
    return jax.tree.map(join, lax.fori_loop(0, P, body, empty))


def scale_by_adam8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments that are packed between steps."""

    def init(params: PyTree) -> Adam8bitState:
        def zeros(signed: bool) -> tuple[PyTree, PyTree]:
            leaves, treedef = jax.tree.flatten(params)
            packed = [packed_zeros(x.shape, signed) for x in leaves]
            codes, scales = zip(*packed)
            return jax.tree.unflatten(treedef, codes), jax.tree.unflatten(treedef, scales)

        (mu, mu_scale), (nu, nu_scale) = zeros(signed=True), zeros(signed=False)
        return Adam8bitState(jnp.zeros((), jnp.int32), mu, nu, mu_scale, nu_scale)

    def update(
        grads: PyTree, state: Adam8bitState, params: PyTree = None
    ) -> tuple[PyTree, Adam8bitState]:
        count = state.steps + 1
        bias1 = 1 - b1 ** count.astype(jnp.float32)
        bias2 = 1 - b2 ** count.astype(jnp.float32)
        by_leaf = jax.tree.map(lambda *row: row, grads, *state[1:])
        rows = jax.tree.leaves(by_leaf, is_leaf=lambda x: isinstance(x, tuple))

        def update_leaf(
            g: jax.Array,
            m: jax.Array,
            v: jax.Array,
            m_scale: dict[str, jax.Array],
            v_scale: dict[str, jax.Array],
        ) -> tuple[PyTree, ...]:
            packed = bool(m_scale)
            if packed:
                m, v = unpack(m, m_scale, signed=True), unpack(v, v_scale, signed=False)
            g = g.astype(jnp.float32)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            step = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            if packed:
                (m, m_scale), (v, v_scale) = pack(m, signed=True), pack(v, signed=False)
            return step, m, v, m_scale, v_scale

        results = in_stacks(partial(in_pieces, update_leaf), rows)
        treedef = jax.tree.structure(grads)
        steps, *rest = (
            jax.tree.unflatten(treedef, [row[i] for row in results]) for i in range(5)
        )
        return steps, Adam8bitState(count, *rest)

    return optax.GradientTransformation(init, update)


def adamw8bit(
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Callable[[PyTree], PyTree],
) -> optax.GradientTransformation:
    """`optax.adamw` with a quarter of its state's memory."""
    return optax.chain(
        scale_by_adam8bit(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
