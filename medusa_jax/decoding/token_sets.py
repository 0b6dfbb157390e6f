"""Sets of tokens as bits: 32 tokens in a word, the first in its lowest bit."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Every token of a word, and no token.
ALL, NO_TOKEN = np.uint32(0xFFFFFFFF), -1


def words(vocab_size: int) -> int:
    """Words of a set of tokens."""
    return -(-vocab_size // 32)


def first_bits(guides: Sequence[Any] | None, vocab_size: int) -> Any:
    """The tokens that may come first in every row [B, W]; a row without a guide may have any.

    None where no row has one.
    """
    if guides is None:
        return None
    first_BW = np.full((len(guides), words(vocab_size)), ALL)
    for row, guide in enumerate(guides):
        if guide is not None:
            first_BW[row] = guide.first_W
    return first_BW


def members(bits_XW: jax.Array, vocab_size: int) -> jax.Array:
    """Whether each token is in a set: [..., V] from words [..., W].

    Example: the word 5 and a vocabulary of 4: tokens 0 and 2.
    """
    place_32 = jnp.arange(32, dtype=jnp.uint32).reshape((1,) * bits_XW.ndim + (32,))
    bits_XW32 = (bits_XW[..., None] >> place_32) & jnp.uint32(1)
    return bits_XW32.astype(bool).reshape(*bits_XW.shape[:-1], -1)[..., :vocab_size]


def only(logits_XV: jax.Array, bits_XW: jax.Array | None) -> jax.Array:
    """Set the logits of tokens outside a set to minus infinity; None changes nothing."""
    if bits_XW is None:
        return logits_XV
    return jnp.where(members(bits_XW, logits_XV.shape[-1]), logits_XV, -jnp.inf)
