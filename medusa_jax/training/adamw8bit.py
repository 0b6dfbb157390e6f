"""AdamW whose two moments take a byte each (Dettmers et al. 2022, "8-bit optimizers").

A moment is cut into blocks along its last axis; a block keeps its largest magnitude in float32
and every element as one of 256 levels relative to that. The levels are spaced like floating
point (dynamic tree quantisation, section 2.1 there): seven decades, the finer steps where the
values are large. Moments become float32 for the update of their own leaf only.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Elements per block, at most. Leaves smaller than SMALL, or with a last axis that no block of
# at least 16 divides, keep float32 moments.
BLOCK = 256
SMALL = 4096


def levels(signed: bool) -> np.ndarray:
    """The 256 levels in rising order, the largest is 1.

    Decade d of seven (d = 0 the smallest: 1e-7 to 1e-6) is cut into 2^d equal parts for each
    sign, or 2^(d+1) where there is only one; a level is the middle of a part. 0 and 1 are added.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = np.linspace(0.1, 1.0, parts + 1) * 10.0 ** (decade - 6)
        middle = (edges[1:] + edges[:-1]) / 2
        values += [*middle, *(-middle if signed else ())]
    return np.sort(np.array(values, np.float32))


SIGNED, UNSIGNED = levels(True), levels(False)


def block_of(shape: tuple[int, ...]) -> int:
    """Elements per block for a leaf of this shape; 0 if it stays in float32."""
    if math.prod(shape) < SMALL:
        return 0
    block = math.gcd(shape[-1], BLOCK)
    return block if block >= 16 else 0


def pack(x: jax.Array, table: np.ndarray) -> tuple[jax.Array, dict[str, jax.Array]]:
    """float32 -> (codes uint8 of the same shape, {"scale": a value per block})."""
    block = block_of(x.shape)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    unit = blocks / jnp.broadcast_to(jnp.where(scale > 0, scale, 1.0), blocks.shape)
    codes = search((table[1:] + table[:-1]) / 2, unit)
    if table[0] == 0:
        # A second moment that rounded to 0 would divide its first by eps alone.
        codes = jnp.where((unit > 0) & (codes == 0), 1, codes)
    return codes.astype(jnp.uint8).reshape(x.shape), {"scale": scale[..., 0]}


def search(edges: np.ndarray, x: jax.Array) -> jax.Array:
    """How many of 255 rising edges lie below x: a binary search in eight steps, int32.

    `jnp.searchsorted` starts from arrays of constant positions, and XLA looks them up at compile
    time: minutes and gigabytes for the parameters of a 7B recipe.
    """
    found = jnp.where(x > float(edges[127]), 128, 0)
    for half in (64, 32, 16, 8, 4, 2, 1):
        found += jnp.where(x > jnp.take(jnp.asarray(edges), found + (half - 1)), half, 0)
    return found


def nothing(shape: tuple[int, ...], table: np.ndarray) -> tuple[jax.Array, Any]:
    """What `pack` gives for zeros, without the search, which XLA would try to do at compile time."""
    block = block_of(shape)
    if not block:
        return jnp.zeros(shape), {}
    scale = jnp.zeros((*shape[:-1], shape[-1] // block))
    return jnp.full(shape, int(np.searchsorted(table, 0.0)), jnp.uint8), {"scale": scale}


def unpack(codes: jax.Array, scale: dict[str, jax.Array], table: np.ndarray) -> jax.Array:
    """The float32 values that `pack` stands for."""
    blocks = jnp.take(jnp.asarray(table), codes.astype(jnp.int32))
    blocks = blocks.reshape(*scale["scale"].shape, -1)
    blocks = blocks * jnp.broadcast_to(scale["scale"][..., None], blocks.shape)
    return blocks.reshape(codes.shape)


class Adam8bitState(NamedTuple):
    """Steps made; codes shaped like the parameters (float32 where small); scales of blocks."""

    steps: jax.Array
    mu: Any
    nu: Any
    mu_scale: Any
    nu_scale: Any


def scale_by_adam8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` with moments that are packed between steps."""

    def init(params: Any) -> Adam8bitState:
        def zeros(table: np.ndarray) -> tuple[Any, Any]:
            treedef: Any
            leaves, treedef = jax.tree.flatten(params)
            made = [nothing(x.shape, table) for x in leaves]
            return tuple(treedef.unflatten([m[i] for m in made]) for i in (0, 1))

        (mu, mu_scale), (nu, nu_scale) = zeros(SIGNED), zeros(UNSIGNED)
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
                m, v = unpack(m, m_scale, SIGNED), unpack(v, v_scale, UNSIGNED)
            g = g.astype(jnp.float32)
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            step = (m / bias1) / (jnp.sqrt(v / bias2) + eps)
            if packed:
                (m, m_scale), (v, v_scale) = pack(m, SIGNED), pack(v, UNSIGNED)
            return step, m, v, m_scale, v_scale

        done = [one(*row) for row in zip(leaves, *stored, strict=True)]
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
