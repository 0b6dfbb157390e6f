"""`no_repeat_ngram_size` as in transformers, for greedy and sampled text.

A token is barred if it would complete an n-gram that the text, prompt included, already contains. The
text of a tree node includes its path, so every node has its own barred tokens, and drafted text equals
plain decoding's with the same option.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from medusa_jax.decoding.copies import Nodes


def node_texts(
    text_BS: jax.Array, length_B: jax.Array, nodes_BM: jax.Array, tree: Nodes
) -> jax.Array:
    """The text up to each node [B, M, S], padded with -1.

    Example: text a b, root r at length 2, the tree of `Tree`'s docstring with tokens
    r x y z w: node 4 (path [0, 2]) has  a b r x w -1 -1 ....

    Args:
      text_BS: the first `length` tokens of a row are valid; S is at least length + L.
    """
    S, L = text_BS.shape[1], tree.path_length
    path_BML = jnp.take(nodes_BM, jnp.asarray(tree.ancestors_ML), axis=1)
    offset_B1S = (jnp.arange(S)[None, :] - length_B[:, None])[:, None, :]
    step_BMS = jnp.broadcast_to(jnp.clip(offset_B1S, 0, L - 1), (*path_BML.shape[:2], S))
    on_path_BMS = jnp.take_along_axis(path_BML, step_BMS, axis=-1)
    text_BMS = jnp.where(offset_B1S < 0, text_BS[:, None, :], on_path_BMS)
    depth_M = jnp.asarray(tree.depth_M)
    is_text_BMS = offset_B1S <= depth_M[None, :, None]
    return jnp.where(is_text_BMS, text_BMS, -1)


def bar_repeats(
    logits_BPO: jax.Array,
    text_BPS: jax.Array,
    last_BP: jax.Array,
    n: int,
    columns_of: Callable[[jax.Array], jax.Array],
    barred_B: jax.Array | None = None,
) -> jax.Array:
    """Set the logits of tokens that would complete an earlier n-gram of each text to minus infinity.

    Example, n = 3: after  a b c a b  the token c is barred, since a b precedes it and ends the text.

    Args:
      last_BP: index of the last token of each text.
      columns_of: maps token ids to columns of the logits.
      barred_B: the rows to change, by default all.
    """
    B, P, S = text_BPS.shape
    index_11S = jnp.arange(S)[None, None, :]
    match_BPS = (index_11S >= n - 1) & (index_11S <= last_BP[..., None])
    if barred_B is not None:
        match_BPS &= barred_B[:, None, None]
    for back in range(1, n):
        tail_BP1 = jnp.take_along_axis(
            text_BPS, jnp.maximum(last_BP - back + 1, 0)[..., None], axis=-1
        )
        match_BPS &= jnp.roll(text_BPS, back, axis=-1) == tail_BP1
    # Out-of-range indices are dropped.
    column_BPS = jnp.where(match_BPS, columns_of(text_BPS), logits_BPO.shape[-1])
    row_B11, place_1P1 = jnp.arange(B)[:, None, None], jnp.arange(P)[None, :, None]
    return logits_BPO.at[row_B11, place_1P1, column_BPS].set(-jnp.inf, mode="drop")
