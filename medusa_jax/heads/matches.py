"""Earlier occurrences of the end of a text, for prompt lookup and for copied chains of a tree."""

import jax
import jax.numpy as jnp


def continuations(
    text_BS: jax.Array, last_B: jax.Array, ngram: int, n: int, *, latest: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The continuation of the longest match for the end of each text.

    Args:
      text_BS: tokens; `last` is the index of the last valid one.
      n: tokens of the continuation.
      latest: prefer the latest of equally long matches, not the earliest.

    Returns: the tokens [B, n], and the length of the match [B], 0 for none.
    """
    S = text_BS.shape[1]
    begin_1S, last_B1 = jnp.arange(S)[None, :], last_B[:, None]
    padded_BS = jnp.pad(text_BS, ((0, 0), (ngram, 0)), constant_values=-1)
    # length[s]: number of tokens before s that equal those at the end of the text.
    length_BS = jnp.zeros(text_BS.shape, jnp.int32)
    matching_BS = begin_1S <= last_B1
    for back in range(ngram):
        at = ngram - back
        token_BS = padded_BS[:, at - 1 : at - 1 + S]
        tail_B1 = jnp.take_along_axis(padded_BS, last_B1 + at, axis=1)
        matching_BS &= (token_BS == tail_B1) & (token_BS >= 0)
        length_BS += matching_BS
    place_1S = begin_1S if latest else S - begin_1S
    score_BS = jnp.where(length_BS > 0, length_BS * (S + 1) + place_1S, 0)
    best_B = jnp.max(score_BS, axis=1)
    place_B = best_B % (S + 1)
    begin_B = place_B if latest else S - place_B
    period_B = jnp.maximum(last_B + 1 - begin_B, 1)
    offset_1L = jnp.arange(n)[None, :]
    at_BL = begin_B[:, None] + offset_1L % period_B[:, None]
    tokens_BL = jnp.take_along_axis(text_BS, jnp.minimum(at_BL, S - 1), axis=1)
    return tokens_BL, best_B // (S + 1)
