"""A chain of the tree that is copied from the text: prompt lookup beside draft heads.

Where the last tokens of the text stood before, what followed them there often follows again: names,
code, lists, and whatever a model repeats. Heads see this only as far as they were trained to; looking
it up costs a comparison of integers. The chain stands beside what heads draft, under the same root,
and is verified in the same pass, so that decoding stays lossless: whichever path agrees for longest is
kept. Two nodes may hold one token; they are two ways to the same text.

The latest of the longest matches counts, of up to `NGRAM` tokens: text resembles what is near.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.heads.prompt_lookup import continuations
from medusa_jax.tree import Tree

# Longest end of the text that is looked up.
NGRAM = 4


def copied_tokens(text_BS: jax.Array, last_B: jax.Array, n: int) -> jax.Array:
    """What followed the end of each text where it stood before: [B, n].

    Example: behind  a b c a b  come c a b c ...

    Args:
      last_B: index of the last token that counts. Where it stood nowhere before, it is copied itself.
    """
    found_B1L, there_B1 = continuations(text_BS, last_B, NGRAM, 1, n, latest=True)
    last_B1 = jnp.take_along_axis(text_BS, last_B[:, None], axis=1)
    return jnp.where(there_B1, found_B1L[:, 0], last_B1)


def with_copies(
    tree: Tree, drafted_BN: jax.Array, text_BS: jax.Array, last_B: jax.Array
) -> jax.Array:
    """Tokens of all nodes [B, M], of those that a drafter filled and the text.

    Example: of the nodes 0 to 4, 1 and 3 are copied. Drafted r x y for 0, 2, 4, copied a b: r a x b y,
    the places 0 3 1 4 2 of r x y a b.
    """
    copied_BC = copied_tokens(text_BS, last_B, len(tree.copied_C))
    both_BM = jnp.concatenate([drafted_BN, copied_BC.astype(drafted_BN.dtype)], axis=1)
    place_M = np.argsort(np.concatenate([tree.drafted_N, tree.copied_C]))
    return both_BM[:, place_M]


def copied_lengths(tokens_T: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """How many of the copied tokens are right where a step begins behind each position: [T].

    Position t stands for a step that has t + 1 tokens in the cache and the root at t + 1, as
    `rank_tuples` has it; nothing beyond the text is right.

    Example: a b c a b c d, position 3: the root is b, c is copied rightly, then a is not.
    """
    T = tokens_T.shape[0]

    def at(root: jax.Array) -> jax.Array:
        copied_L = copied_tokens(tokens_T[None], root[None], n)[0]
        place_L = root + 1 + jnp.arange(n)
        true_L = tokens_T[jnp.minimum(place_L, T - 1)]
        right_L = (copied_L == true_L) & (place_L < length)
        return jnp.cumprod(right_L.astype(jnp.int32)).sum()

    return lax.map(at, jnp.minimum(jnp.arange(T) + 1, T - 1), batch_size=64)
