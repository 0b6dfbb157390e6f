"""AdamW with one byte per moment: dynamic tree quantisation (Dettmers et al. 2022, "8-bit optimizers", 2.1).

Moments are float32 only during the update of their leaf.

An array is divided into blocks along its last axis. A block keeps its largest magnitude in float32 and every
element as one of 256 levels relative to it. The levels are spaced like floating point: seven decades of
magnitudes, with finer steps for large values.

    decade d of seven        10^(d-7) to 10^(d-6), the last is 0.1 to 1
    P equal intervals each   P = 2^d with a sign, 2^(d+1) without
    levels                   the middles of the intervals, 0 and 1

Positive levels have ranks 0, 1, 2, ... from the smallest. As P doubles from decade to
decade, rank + 1 (rank + 2 without a sign) is P + interval in binary, and its leading bit
gives the decade. Codes are therefore converted by arithmetic, which XLA fuses into its
consumers. Table look-ups would be gathers, and each would write a float32 array of the
parameters' size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from medusa_jax.sharding import PyTree

DECADES = 7
# Elements per block, at most. Leaves smaller than SMALL, or whose last axis has no block size of at least 16,
# keep float32 moments.
BLOCK = 256
SMALL = 4096


def block_of(shape: tuple[int, ...]) -> int:
    """Elements per block for a leaf of this shape; 0 if it stays in float32."""
    if math.prod(shape) < SMALL:
        return 0
    block = math.gcd(shape[-1], BLOCK)
    return block if block >= 16 else 0


def magnitude(rank: jax.Array, signed: bool) -> jax.Array:
    """The positive level of a rank, 0 for rank -1: float32.

    Example, with a sign: ranks -1, 0, 1, 2, ..., 126, 127 are 0, 0.55e-6, 0.325e-5, 0.775e-5, ...,
    0.993, 1.
    """
    first = 1 if signed else 2
    number = lax.max(rank, 0) + first
    bit = 31 - lax.clz(number)
    fraction = (number.astype(jnp.float32) + 0.5) * jnp.exp2(-bit.astype(jnp.float32)) - 1
    level = (0.1 + 0.9 * fraction) * decade_end(bit - (first - 1))
    level = lax.select(rank == last_rank(signed), jnp.ones_like(level), level)
    return lax.select(rank < 0, jnp.zeros_like(level), level)


def decade_end(decade: jax.Array) -> jax.Array:
    """10^(decade - 6) for decades 0 to 6."""
    end = jnp.full(decade.shape, 1e-6)
    for bit, factor in ((1, 10.0), (2, 100.0), (4, 10000.0)):
        end = jnp.where((decade & bit) > 0, end * factor, end)
    return end


def last_rank(signed: bool) -> int:
    """The rank of the level 1."""
    return 127 if signed else 254


def nearest_rank(x: jax.Array, signed: bool) -> jax.Array:
    """The rank whose level is nearest to x in [0, 1]: int32, -1 for the level 0."""
    first = 1 if signed else 2
    decade = jnp.zeros(x.shape, jnp.int32)
    for d in range(1, DECADES):
        decade += x >= 10.0 ** (d - DECADES)
    intervals = jnp.exp2((decade + (first - 1)).astype(jnp.float32))
    interval = jnp.floor((x / decade_end(decade) - 0.1) * (intervals / 0.9))
    rank = (intervals + lax.clamp(0.0, interval, intervals - 1)).astype(jnp.int32) - first
    # Only a neighbour across the end of a decade can be nearer than the middle of the interval.
    level = magnitude(rank, signed)
    neighbour = rank + jnp.sign(x - level).astype(jnp.int32)
    nearer = jnp.abs(magnitude(neighbour, signed) - x) < jnp.abs(level - x)
    return lax.select(nearer, neighbour, rank)


def pack(x: jax.Array, signed: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """float32 -> (codes uint8 of the same shape, {"scale": a value per block}).

    Codes are in the order of levels: with a sign 0 to 126 are negative, 127 is 0, 255 is 1 (-1 is not a level);
    without a sign code 0 is 0.
    """
    blocks = x.reshape(*x.shape[:-1], -1, block_of(x.shape))
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    unit = blocks / jnp.broadcast_to(jnp.where(scale > 0, scale, 1.0), blocks.shape)
    rank = nearest_rank(jnp.abs(unit), signed)
    if signed:
        codes = jnp.where(unit < 0, 126 - jnp.minimum(rank, 126), 128 + rank)
    else:
        # Never round a second moment to 0: its first moment would be divided by eps.
        codes = 1 + jnp.where(unit > 0, jnp.maximum(rank, 0), rank)
    return codes.astype(jnp.uint8).reshape(x.shape), {"scale": scale[..., 0]}


def unpack(codes: jax.Array, scale: dict[str, jax.Array], signed: bool) -> jax.Array:
    """The inverse of `pack`, up to rounding: float32."""
    number = codes.astype(jnp.int32)
    if signed:
        rank = jnp.where(number < 127, 126 - number, number - 128)
        unit = jnp.where(number < 127, -1.0, 1.0) * magnitude(rank, signed)
    else:
        unit = magnitude(number - 1, signed)
    blocks = unit.reshape(*scale["scale"].shape, -1)
    blocks *= jnp.broadcast_to(scale["scale"][..., None], blocks.shape)
    return blocks.reshape(codes.shape)


def packed_zeros(
    shape: tuple[int, ...], signed: bool
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`pack` of zeros, as constants: XLA would evaluate `pack` at compile time."""
    block = block_of(shape)
    if not block:
        return jnp.zeros(shape), {}
    scale = jnp.zeros((*shape[:-1], shape[-1] // block))
    return jnp.full(shape, 127 if signed else 0, jnp.uint8), {"scale": scale}


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
            lambda leaf, x: lax.dynamic_update_index_in_dim(leaf, x, i, 1), out, piece(i)
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
        treedef: Any = jax.tree.structure(grads)
        rows = [*zip(*map(treedef.flatten_up_to, (grads, *state[1:])))]

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
        steps, *moments = (
            jax.tree.unflatten(treedef, [row[i] for row in results]) for i in range(5)
        )
        return steps, Adam8bitState(count, *moments)

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
