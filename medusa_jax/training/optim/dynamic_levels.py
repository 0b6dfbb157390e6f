"""Dynamic tree quantisation to bytes (Dettmers et al. 2022, "8-bit optimizers", 2.1).

An array is divided into blocks along its last axis. A block keeps its largest magnitude in float32 and every
element as one of 256 levels relative to it. The levels are spaced like floating point: seven decades of
magnitudes, with finer steps for large values.

    decade d of seven        10^(d-7) to 10^(d-6), the last is 0.1 to 1
    P equal intervals each   P = 2^d with a sign, 2^(d+1) without
    levels                   the middles of the intervals, 0 and 1

Positive levels have ranks 0, 1, 2, ... from the smallest. As P doubles from decade to decade,
rank + 1 (rank + 2 without a sign) is P + interval in binary, and its leading bit gives the decade. So codes are
converted by arithmetic that XLA fuses into its readers. Look-up tables would be gathers, each of which writes
a float32 array of the parameters' size.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

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
    other = rank + jnp.sign(x - level).astype(jnp.int32)
    nearer = jnp.abs(magnitude(other, signed) - x) < jnp.abs(level - x)
    return lax.select(nearer, other, rank)


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
