"""No n-gram twice: greedy or sampled text under `no_repeat_ngram_size` as transformers has it.

A token is barred where it would complete an n-gram that the text, prompt included, already holds.
Behind a draft the text goes down the path to it, so every node has bars of its own, and drafted
text stays that of plain decoding with the same bars.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def barred_tokens(text: Sequence[int], n: int) -> list[int]:
    """Tokens that must not follow `text`, on the host.

    Example, n = 3:  a b c a b  ->  c
    """
    tail = tuple(text[len(text) - n + 1 :])
    if len(tail) < n - 1:
        return []
    ends = range(n - 1, len(text))
    return sorted({text[end] for end in ends if tuple(text[end - n + 1 : end]) == tail})


def without_barred(logits_BV: jax.Array, text: Sequence[int], n: int) -> jax.Array:
    """Logits of one position, minus infinity for what is barred behind `text` (n = 0: nothing)."""
    barred = barred_tokens(text, n) if n else []
    return logits_BV.at[:, jnp.array(barred, int)].set(-jnp.inf) if barred else logits_BV


def texts_behind(
    text_BS: jax.Array, length_B: jax.Array, nodes_BM: jax.Array, tree: Any
) -> tuple[jax.Array, jax.Array]:
    """The text down to each node [B, M, S], -1 behind it, and the index of its last token [B, M].

    Example: text a b, root r at length 2, the tree of `Tree`'s docstring with tokens
    r x y z w: node 4 (path [0, 2]) has  a b r x w -1 -1 ...  and index 4.

    Args:
      text_BS: the first `length` tokens of a row count; S is at least length + L.
    """
    S, L = text_BS.shape[1], tree.ancestors_ML.shape[1]
    path_BML = jnp.take(nodes_BM, jnp.asarray(tree.ancestors_ML), axis=1)
    offset_B1S = (jnp.arange(S)[None, :] - length_B[:, None])[:, None, :]
    step_BMS = jnp.broadcast_to(jnp.clip(offset_B1S, 0, L - 1), (*path_BML.shape[:2], S))
    on_path_BMS = jnp.take_along_axis(path_BML, step_BMS, axis=-1)
    whole_BMS = jnp.where(offset_B1S < 0, text_BS[:, None, :], on_path_BMS)
    depth_M = jnp.asarray(tree.depth_M)
    inside_BMS = offset_B1S <= depth_M[None, :, None]
    return jnp.where(inside_BMS, whole_BMS, -1), length_B[:, None] + depth_M[None, :]


def without_repeats(
    logits_BMV: jax.Array,
    text_BMS: jax.Array,
    last_BM: jax.Array,
    n: int,
    places: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Logits with minus infinity for what would complete an old n-gram behind each text.

    Example, n = 3: behind  a b c a b  the place of c matches: before it stands a b, as at the
    end of the text.

    Args:
      places: where among the logits a token stands, by default at its id.
    """
    B, M, S = text_BMS.shape
    index_11S = jnp.arange(S)[None, None, :]
    match_BMS = (index_11S >= n - 1) & (index_11S <= last_BM[..., None])
    for back in range(1, n):
        tail_BM1 = jnp.take_along_axis(
            text_BMS, jnp.maximum(last_BM - back + 1, 0)[..., None], axis=-1
        )
        match_BMS &= jnp.roll(text_BMS, back, axis=-1) == tail_BM1
    token_BMS = text_BMS if places is None else places(text_BMS)
    # What does not match is out of range, and dropped.
    token_BMS = jnp.where(match_BMS, token_BMS, logits_BMV.shape[-1])
    row_B11, node_1M1 = jnp.arange(B)[:, None, None], jnp.arange(M)[None, :, None]
    return logits_BMV.at[row_B11, node_1M1, token_BMS].set(-jnp.inf, mode="drop")
