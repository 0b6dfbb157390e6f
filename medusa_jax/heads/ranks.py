"""Teacher-forced ranks of the true tokens under each head, to fit trees (Medusa 2.3.3)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads.drafter import Drafter, shift_left
from medusa_jax.model.backbone import Backbone
from medusa_jax.sharding import Params
from medusa_jax.tree.growth import MISS

# (head k, logits [B, C, O], their positions in the row [B, C]) -> scores that order the guesses.
ScoreFn = Callable[[int, jax.Array, jax.Array], jax.Array]


def label_ranks(
    drafter: Drafter,
    params: Params,
    backbone: Backbone,
    features_KBTD: jax.Array,
    tokens_BT: jax.Array,
    chunk: int,
    score: ScoreFn | None = None,
) -> jax.Array:
    """Rank of the true token under each head: [B, T, K] int32, at most MISS.

    Entry [b, t, k] is the number of tokens that head k, at position t, prefers to the token at
    t + k + 2, or MISS if that token is outside its draft vocabulary. It is meaningless if t + k + 2 is
    past the end of the row; the caller has to mask it. Logits are computed for `chunk` positions of
    one head at a time.

    Args:
      features_KBTD: `Drafter.features` of these rows.
      score: gives the scores that order the guesses; None orders by logits.
    """
    K, B, T = features_KBTD.shape[:3]
    chunk = min(chunk, T)
    pad = -T % chunk

    def pieces(x_BT: jax.Array) -> jax.Array:
        """[B, T, ...] -> [T / chunk, B, chunk, ...]."""
        x = jnp.pad(x_BT, ((0, 0), (0, pad)) + ((0, 0),) * (x_BT.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    positions = pieces(jnp.broadcast_to(jnp.arange(T)[None, :], (B, T)))
    ranks = []
    for k in range(K):

        def one(xs: tuple[jax.Array, ...], k: int = k) -> jax.Array:
            features_BCD, labels_BC, positions_BC = xs
            scores_BCO = drafter.head_logits(params, backbone, k, features_BCD)
            if score is not None:
                scores_BCO = score(k, scores_BCO, positions_BC)
            column_BC = backbone.columns_of(labels_BC)
            is_scored_BC = column_BC < backbone.outputs
            score_BC1 = jnp.take_along_axis(scores_BCO, column_BC[..., None], axis=-1)
            # NaN counts as better than the label, and a label without a finite score as a miss, so that broken
            # heads do not look perfect.
            is_scored_BC &= jnp.isfinite(score_BC1[..., 0])
            rank_BC = jnp.sum(~(scores_BCO <= score_BC1), axis=-1)
            return jnp.where(is_scored_BC, jnp.minimum(rank_BC, MISS), MISS)

        labels = pieces(shift_left(tokens_BT, k + 2))
        ranks_NBC = lax.map(one, (pieces(features_KBTD[k]), labels, positions))
        ranks.append(jnp.moveaxis(ranks_NBC, 0, 1).reshape(B, -1)[:, :T])
    return jnp.stack(ranks, axis=-1).astype(jnp.int32)
