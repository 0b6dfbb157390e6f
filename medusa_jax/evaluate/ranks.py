"""Ranks of a text's tokens under the draft heads, and numbers of copyable tokens, as in decoding."""

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.decoding.copies import copied_tokens
from medusa_jax.decoding.repeats import bar_repeats
from medusa_jax.decoding.sampling import gumbel
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.ranks import label_ranks
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params
from medusa_jax.tree.growth import MISS

# Positions per chunk; one chunk of one head's logits is in memory at a time.
CHUNK = 64


def rank_tuples(
    drafter: Drafter,
    head_params: Params,
    backbone: Backbone,
    tokens_BT: jax.Array,
    length_B: jax.Array,
    noise: tuple[jax.Array, jax.Array] | None = None,
    no_repeat_ngram_size: int = 0,
) -> jax.Array:
    """Teacher-forced rank of the true token under each head: [B, T, K] int32.

    Like `label_ranks`, with MISS past the end of the text.

    Args:
      backbone: the backbone with stored or prepared parameters.
      noise: (row keys [B], temperature [B]): rank by logits + T g[position] as sampled
        decoding does.
      no_repeat_ngram_size: as in decoding. The first head's guesses follow a known root, so barred
        tokens are left out of their ranking.
    """
    B, T = tokens_BT.shape
    position_BT = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
    segment_BT = (position_BT < length_B[:, None]).astype(jnp.int32)
    rows = (tokens_BT, position_BT, segment_BT)
    backbone = for_drafting(backbone, head_params)
    backbone = backbone.tapped(drafter.taps)
    text = TextRows(backbone.forward(*rows), *rows)
    features_KBTD = drafter.features(head_params, backbone, text)

    def score(k: int, logits_BCO: jax.Array, positions_BC: jax.Array) -> jax.Array:
        if no_repeat_ngram_size and k == 0:
            text_BCT = jnp.broadcast_to(tokens_BT[:, None, :], (*positions_BC.shape, T))
            last_BC = jnp.minimum(positions_BC + 1, T - 1)
            logits_BCO = bar_repeats(
                logits_BCO, text_BCT, last_BC, no_repeat_ngram_size, backbone.columns_of
            )
        if noise is None:
            return logits_BCO
        dtype = logits_BCO.dtype
        g_BCO = gumbel(noise[0], positions_BC + k + 2, backbone.scored, dtype)
        return logits_BCO + noise[1][:, None, None].astype(dtype) * g_BCO

    ranks_BTK = label_ranks(
        drafter, head_params, backbone, features_KBTD, tokens_BT, CHUNK, score
    )
    ahead_11K = jnp.arange(2, drafter.n_heads + 2)[None, None, :]
    label_BTK = position_BT[..., None] + ahead_11K
    return jnp.where(label_BTK < length_B[:, None, None], ranks_BTK, MISS)


def copied_lengths(
    tokens_T: jax.Array, length: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """Correct copied tokens of a step that starts after each position, and length of the match: [T] each.

    At position t the step has t + 1 tokens in the cache and the root at t + 1, as in `rank_tuples`.
    Tokens past the end of the text count as wrong.

    Example: a b c a b c d, position 3: the root is b; the copied c is right, the copied a is not. The
    match is a b.
    """
    T = tokens_T.shape[0]

    def at(root: jax.Array) -> tuple[jax.Array, jax.Array]:
        copied_1L, match_1 = copied_tokens(tokens_T[None], root[None], n)
        place_L = root + 1 + jnp.arange(n)
        true_L = tokens_T[jnp.minimum(place_L, T - 1)]
        right_L = (copied_1L[0] == true_L) & (place_L < length)
        return jnp.cumprod(right_L.astype(jnp.int32)).sum(), match_1[0]

    return lax.map(at, jnp.minimum(jnp.arange(T) + 1, T - 1), batch_size=64)
