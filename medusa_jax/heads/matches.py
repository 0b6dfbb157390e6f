"""Earlier occurrences of the end of a text, for prompt lookup and for copied chains of a tree."""

import jax
import jax.numpy as jnp
from jax import lax


def continuations(
    text_BS: jax.Array,
    last_B: jax.Array,
    ngram: int,
    matches: int,
    length: int,
    *,
    latest: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Continuations of the best matches for the end of each text.

    Args:
      text_BS: tokens; `last` is the index of the last valid one.
      length: tokens per continuation.
      latest: prefer the latest of equally long matches, not the earliest.

    Returns: tokens [B, C, length] in order of preference, and the length of each match [B, C], 0 for none.
    """
    S = text_BS.shape[1]
    begin_1S, last_B1 = jnp.arange(S)[None, :], last_B[:, None]
    padded = jnp.pad(text_BS, ((0, 0), (ngram, 0)), constant_values=-1)
    # same[s]: number of tokens before s that equal those at the end of the text.
    same_BS = jnp.zeros(text_BS.shape, jnp.int32)
    still_BS = begin_1S <= last_B1
    for back in range(ngram):
        at = ngram - back
        before_BS = padded[:, at - 1 : at - 1 + S]
        tail_B1 = jnp.take_along_axis(padded, last_B1 + at, axis=1)
        still_BS &= (before_BS == tail_B1) & (before_BS >= 0)
        same_BS += still_BS
    place_1S = begin_1S if latest else S - begin_1S
    worth_BS = jnp.where(same_BS > 0, same_BS * (S + 1) + place_1S, 0)
    if matches == 1:  # a CPU sorts integers for `top_k`
        best_BC = jnp.max(worth_BS, axis=1, keepdims=True)
    else:
        best_BC = lax.top_k(worth_BS, min(matches, S))[0]
    place_BC = best_BC % (S + 1)
    begin_BC = place_BC if latest else S - place_BC
    period_BC = jnp.maximum(last_B1 + 1 - begin_BC, 1)
    ahead_11L = jnp.arange(length)[None, None, :]
    at_BCL = begin_BC[..., None] + ahead_11L % period_BC[..., None]
    tokens_BCL = jnp.take_along_axis(text_BS[:, None], jnp.minimum(at_BCL, S - 1), axis=2)
    return tokens_BCL, best_BC // (S + 1)
