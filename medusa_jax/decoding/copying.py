"""A chain of the tree that is copied from the text: prompt lookup in addition to draft heads.

If the last tokens of the text occurred earlier, the tokens after that place often follow again: names,
code, lists, and other repeated text. Heads predict this only as far as they were trained to; looking it
up costs integer comparisons. The chain shares the root with the drafts of the heads and is verified in
the same pass, so decoding stays lossless: the longest path that agrees is kept. Two nodes may hold the
same token.

The latest of the longest matches of up to `NGRAM` tokens is used, since nearby text is more similar.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.heads.prompt_lookup import continuations
from medusa_jax.tree import Tree

# Longest n-gram to look up.
NGRAM = 4


def copied_tokens(text_BS: jax.Array, last_B: jax.Array, n: int) -> jax.Array:
    """The n tokens after an earlier occurrence of the end of each text: [B, n].

    Example:  a b c a b  gives c a b c ...

    Args:
      last_B: index of the last valid token. Without an earlier occurrence, this token is repeated.
    """
    found_B1L, there_B1 = continuations(text_BS, last_B, NGRAM, 1, n, latest=True)
    last_B1 = jnp.take_along_axis(text_BS, last_B[:, None], axis=1)
    return jnp.where(there_B1, found_B1L[:, 0], last_B1)


def with_copies(
    tree: Tree, drafted_BN: jax.Array, text_BS: jax.Array, last_B: jax.Array
) -> jax.Array:
    """Merge drafted and copied tokens into tokens of all nodes [B, M].

    Example: of the nodes 0 to 4, 1 and 3 are copied. Drafted r x y for 0, 2, 4 and copied a b give
    r a x b y, the places 0 3 1 4 2 of r x y a b.
    """
    copied_BC = copied_tokens(text_BS, last_B, len(tree.copied_C))
    both_BM = jnp.concatenate([drafted_BN, copied_BC.astype(drafted_BN.dtype)], axis=1)
    place_M = np.argsort(np.concatenate([tree.drafted_N, tree.copied_C]))
    return both_BM[:, place_M]


def copied_lengths(tokens_T: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Number of correct copied tokens for a step that starts after each position: [T].

    At position t the step has t + 1 tokens in the cache and the root at t + 1, as in `rank_tuples`.
    Tokens past the end of the text count as wrong.

    Example: a b c a b c d, position 3: the root is b; the copied c is right, the copied a is not.
    """
    T = tokens_T.shape[0]

    def at(root: jax.Array) -> jax.Array:
        copied_L = copied_tokens(tokens_T[None], root[None], n)[0]
        place_L = root + 1 + jnp.arange(n)
        true_L = tokens_T[jnp.minimum(place_L, T - 1)]
        right_L = (copied_L == true_L) & (place_L < length)
        return jnp.cumprod(right_L.astype(jnp.int32)).sum()

    return lax.map(at, jnp.minimum(jnp.arange(T) + 1, T - 1), batch_size=64)
