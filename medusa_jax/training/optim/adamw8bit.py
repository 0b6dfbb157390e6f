"""AdamW whose two moments take a byte each (Dettmers et al. 2022, "8-bit optimizers").

How a moment becomes bytes is in `dynamic_levels.py`. Moments become float32 for the update of
their own leaf only.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from medusa_jax.training.optim.dynamic_levels import nothing, pack, unpack

# Leaves up to this size are updated together with those of the same shape, larger ones in parts.
PART = 1 << 22


class Adam8bitState(NamedTuple):
    """Steps made; codes shaped like the parameters (float32 where small); scales of blocks."""

    steps: jax.Array
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any


def stacked(f: Any, *columns: list[Any]) -> list[Any]:
    """[f(*row) for row in zip(*columns)], small arrays of one shape in one call.

    f works entry by entry (or on blocks of the last axis); its arguments are trees of arrays.
    Hundreds of adapters are then a few programs, not hundreds, for the compiler.
    """
    rows = list(zip(*columns, strict=True))
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        key = str(jax.tree.map(jnp.shape, row)) if row[0].size <= PART else i
        groups.setdefault(key, []).append(i)
    out: list[Any] = [None] * len(rows)
    for members in groups.values():
        if len(members) == 1:
            out[members[0]] = f(*rows[members[0]])
            continue
        results = f(*jax.tree.map(lambda *x: jnp.stack(x), *(rows[i] for i in members)))
        for place, i in enumerate(members):
            out[i] = jax.tree.map(lambda x, place=place: x[place], results)
    return out


def in_parts(f: Any, *row: Any) -> Any:
    """f(*row), large arrays one part of their rows after the other: [R, ...] -> [R, ...].

    Moments then never lie there in float32 as a whole. Part i takes every P-th row from the
    i-th on, so that each part is spread over devices as the whole is.
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

    def part(i: Any) -> Any:
        return f(*jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 1, False), rows))

    def body(i: Any, out: Any) -> Any:
        # Written in place: stacked results would have to be transposed, another whole copy.
        return jax.tree.map(
            lambda whole, x: lax.dynamic_update_index_in_dim(whole, x, i, 1), out, part(i)
        )

    empty = jax.tree.map(
        lambda x: jnp.zeros((x.shape[0], P, *x.shape[1:]), x.dtype),
        jax.eval_shape(part, 0),
    )
    return jax.tree.map(join, lax.fori_loop(0, P, body, empty))


def scale_by_adam8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments that are packed between steps."""

    def init(params: Any) -> Adam8bitState:
        def zeros(signed: bool) -> tuple[Any, Any]:
            treedef: Any
            leaves, treedef = jax.tree.flatten(params)
            made = [nothing(x.shape, signed) for x in leaves]
            return tuple(treedef.unflatten([m[i] for m in made]) for i in (0, 1))

        (mu, mu_scale), (nu, nu_scale) = zeros(signed=True), zeros(signed=False)
        return Adam8bitState(jnp.zeros((), jnp.int32), mu, nu, mu_scale, nu_scale)

    def update(grads: Any, state: Adam8bitState, params: Any = None) -> Any:
        count = state.steps + 1
        bias1 = 1 - b1 ** count.astype(jnp.float32)
        bias2 = 1 - b2 ** count.astype(jnp.float32)
        treedef: Any
        leaves, treedef = jax.tree.flatten(grads)
        stored = [treedef.flatten_up_to(part) for part in state[1:]]

        def one(g: jax.Array, m: Any, v: Any, m_scale: Any, v_scale: Any) -> Any:
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

        done = stacked(partial(in_parts, one), leaves, *stored)
        steps, *rest = (treedef.unflatten([row[i] for row in done]) for i in range(5))
        return steps, Adam8bitState(count, *rest)

    return optax.GradientTransformation(init, update)


def adamw8bit(
    schedule: optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
    mask: Any,
) -> optax.GradientTransformation:
    """AdamW as `optax.adamw`, at a quarter of its state's memory."""
    return optax.chain(
        scale_by_adam8bit(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
