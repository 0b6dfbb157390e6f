"""Record how well drafts would do at every position of the model's own texts.

Lossless decoding writes the text of plain decoding, whatever the drafter. So one teacher-forced pass
over that text gives the guess of each head at every position, and from these the mean accepted length
of any tree (`tree/growth.py: replay`), without decoding again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.api import Model, Options
from medusa_jax.api.prompts import equal_batches
from medusa_jax.decoding.copies import REPEATS, copied_tokens
from medusa_jax.decoding.repeats import bar_repeats
from medusa_jax.decoding.request import power_of_two
from medusa_jax.decoding.sampling import gumbel, row_keys
from medusa_jax.evaluate.texts import ROWS, Text
from medusa_jax.heads.drafter import Drafter, TextRows
from medusa_jax.heads.ranks import label_ranks
from medusa_jax.heads.vocabulary import for_drafting
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params
from medusa_jax.tree.growth import MISS, TextRanks

# Positions per chunk; one chunk of one head's logits is in memory at a time.
CHUNK = 64
# Longest chain copied from the text, as in prompt lookup.
MOST_COPIED = 10


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


_lengths = jax.jit(jax.vmap(copied_lengths, (0, 0, None)), static_argnums=2)
_ranks = jax.jit(rank_tuples, static_argnames=("drafter", "no_repeat_ngram_size"))


def record(model: Model, texts: Sequence[Text], options: Options) -> list[TextRanks]:
    """Record ranks and correct copies at the positions of each text where a step may begin.

    These are the positions from the last prompt token on for which the text has the token of the
    deepest head. A short text may have none.

    Args:
      options: of the texts. Above temperature 0 drafts are ranked with the verifier's noise.
    """
    records, drafter, no_repeat = [], model.drafter, model.no_repeat_ngram_size
    for numbers, rows in equal_batches(len(texts), ROWS):
        noise = None
        if options.temperature > 0:
            seed_B = jnp.full((len(rows),), options.seed % 2**32, jnp.uint32)
            keys = row_keys(seed_B, jnp.zeros((len(rows),), jnp.int32))
            noise = (keys, jnp.full((len(rows),), options.temperature))
        ids = [texts[i].ids for i in rows]
        length_B: np.ndarray = np.array([len(x) for x in ids], np.int32)
        n_slots = power_of_two(int(length_B.max()), 64)
        tokens_BT = np.zeros((len(rows), n_slots), np.int32)
        for row, x in zip(tokens_BT, ids):
            row[: len(x)] = x
        tokens = jnp.asarray(tokens_BT)
        heads, backbone = model.variables["heads"], model.backbone
        ranks_BTK = np.asarray(
            _ranks(drafter, heads, backbone, tokens, length_B, noise, no_repeat)
        )
        copied_BT, match_BT = map(np.asarray, _lengths(tokens, length_B, MOST_COPIED))
        for b, i in enumerate(numbers):
            # The step after prefill starts at the last prompt position.
            start, end = texts[i].n_prompt - 1, len(ids[b]) - drafter.n_heads - 1
            span = slice(start, max(start, end))
            repeats_P = match_BT[b, span] >= REPEATS
            records.append(TextRanks(ranks_BTK[b, span], copied_BT[b, span], repeats_P))
    return records
