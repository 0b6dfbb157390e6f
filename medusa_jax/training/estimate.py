"""Tokens per decoding step, estimated on held-out text while the heads train (Medusa 2.3.3).

At every position whose next K + 1 tokens are counted, the rank of each true token under its head
is taken together, as one tuple: heads tend to be right at the same places, so the product of
their accuracies would be too low. Two figures come of it, both with steps that start anywhere
alike (decoding favours some places, `medusa_jax.calibrate` measures that):

    accepted_length_chain   1 + sum over d of the share of positions where the first guesses of
                            heads 1 ... d are all right: what a chain of K drafts yields
    accepted_length_tree    the same over the nodes of the best tree of 64, found on the first
                            half of the rows and counted on the second: other texts

The tuples are those of the held-out text, not of the model's own output, which is easier to
guess: the figures compare runs, they do not promise a speed.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from medusa_jax.heads import Base, Drafter
from medusa_jax.heads.layers import later
from medusa_jax.training import losses

Params = Any

# Rows of held-out text to look at: enough for two digits.
ROWS = 64
TREE_NODES = 64
# Ranks from here on are no part of any tree.
MISS = 64


def head_ranks(
    params: Params, drafter: Drafter, base: Base, hidden_BTD: jax.Array, batch: losses.Batch,
    chunk: int,
) -> jax.Array:  # fmt: skip
    """Rank of the true token under each head, [B, T, K] int32; -1 where a pair does not count.

    Logits exist for `chunk` positions of one head at a time.
    """
    features_KBTD = drafter.features(params, base, hidden_BTD, *losses.rows(batch))
    K, B, T = features_KBTD.shape[:3]
    chunk = min(chunk, T)
    pad = -T % chunk

    def pieces(x_BT: jax.Array) -> jax.Array:
        """[B, T, ...] -> [T / chunk, B, chunk, ...]."""
        x = jnp.pad(x_BT, ((0, 0), (0, pad)) + ((0, 0),) * (x_BT.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    ranks = []
    for k in range(K):

        def one(xs: tuple[jax.Array, jax.Array], k: int = k) -> jax.Array:
            features, labels = xs
            logits = drafter.head_logits(params, base, k, features)
            own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
            return jnp.minimum(jnp.sum(logits > own, axis=-1), MISS)

        labels_BT = later(batch["tokens"], k + 2)
        found = lax.map(one, (pieces(features_KBTD[k]), pieces(labels_BT)))
        ranks.append(jnp.moveaxis(found, 0, 1).reshape(B, -1)[:, :T])
    counted_BT = losses.pair_mask(batch["counted"], batch["segment_ids"], K + 1)
    return jnp.where(counted_BT[..., None], jnp.stack(ranks, axis=-1), -1).astype(jnp.int32)


def accepted_lengths(ranks: np.ndarray) -> dict[str, float]:
    """Both figures from ranks [..., K]; nothing where no position counts.

    Example, K = 2, four positions: (0, 0) (0, 3) (1, 0) (0, 0) give a chain of
    1 + 3/4 + 2/4 = 2.25.
    """
    from medusa_jax.decoding.calibrate import chain_length, expected_tokens, joint_growth
    from medusa_jax.tree import Tree

    tuples_NK = ranks.reshape(-1, ranks.shape[-1])
    tuples_NK = tuples_NK[tuples_NK[:, 0] >= 0]
    if len(tuples_NK) < 2:
        return {}
    # Rows come in order, so at most the text that this cut runs through is in both halves.
    first, second = np.array_split(tuples_NK, 2)
    tree = Tree.from_choices(joint_growth(first, TREE_NODES - 1))
    return {
        "accepted_length_chain": chain_length(tuples_NK),
        "accepted_length_tree": float(expected_tokens(second, tree)),
    }
