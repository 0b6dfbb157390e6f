"""Teaches a drafter's attention to find where the next token occurred before (an induction head).

A language model repeats names, phrases and whole sentences of its text. Attention can copy them by finding an
earlier occurrence of the same tokens and taking the next token (Olsson et al. 2022, "In-context learning and
induction heads"). A single layer can do this if it reads [e_{s+1} ; f_s]: the hidden state f_s at token s encodes
the tokens before e_{s+1}. Draft heads hardly learn it from the other loss terms, which reward a copied token only
once attention, values and output work together. This term rewards the attention by itself.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.errors import UserError
from medusa_jax.heads.drafter import Drafter, TextRows, shift_left
from medusa_jax.heads.optional import SupportsInduction
from medusa_jax.model.backbone import Backbone
from medusa_jax.model.grouped import group_queries
from medusa_jax.model.masks import CausalMask
from medusa_jax.model.product import at_least_f32
from medusa_jax.model.running_softmax import BLOCK, block, scores, whole_blocks
from medusa_jax.sharding import Params
from medusa_jax.training.losses.pairs import Batch, pair_mask


def check(drafter: Drafter) -> None:
    """Refuse a drafter without attention over the text.

    Raises:
      UserError: names the drafter.
    """
    if not isinstance(drafter, SupportsInduction):
        raise UserError(
            "train.induction_weight is for drafters with attention over the text, eagle and eagle3, not "
            f"{drafter.name}"
        )


def induction_loss(
    drafter: Drafter, params: Params, backbone: Backbone, text: TextRows, batch: Batch
) -> jax.Array:
    """`induction_sum` of the drafter's first layer over the pairs of the first head whose label has a logit."""
    check(drafter)
    assert isinstance(drafter, SupportsInduction)
    q_BTNH, k_BGTH = drafter.queries_keys(params, backbone, text)
    scored_BT = backbone.columns_of(batch["tokens"]) < backbone.outputs
    pairs_BT = pair_mask(batch["counted"], batch["segment_ids"], 2)
    return induction_sum(q_BTNH, k_BGTH, batch, pairs_BT & shift_left(scored_BT, 2))


def induction_sum(
    q_BTNH: jax.Array, k_BGTH: jax.Array, batch: Batch, pairs_BT: jax.Array
) -> jax.Array:
    """Sum of -log(mean attention, over the heads, to rows that read the token to predict).

    Row t reads tokens up to t + 1 and predicts token t + 2, so it should attend to the rows s <= t whose
    token s + 1 is that token. Rows without such an s add 0. We average over heads before the log,
    so single heads may attend elsewhere.

        token          a b c a b c      row 2 (reads a, predicts b) should attend to row 0 (reads b)
        row            0 1 2 3          row 3 (reads b, predicts c) to row 1 (reads c)

    The scores of one block of queries exist at a time.

    Args:
      q_BTNH, k_BGTH: queries and keys of a layer, rotated.
      pairs_BT: rows that count.
    """
    N, dtype = q_BTNH.shape[2], at_least_f32(q_BTNH.dtype)
    tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
    # Keys are float32, to accumulate their gradient; products use the queries' type.
    q_BGTRH, k_BGTH, source_BT, label_BT, pairs_BT, mask = whole_blocks(
        group_queries(q_BTNH, k_BGTH.shape[1]), k_BGTH.astype(dtype),
        shift_left(tokens_BT, 1), shift_left(tokens_BT, 2), pairs_BT, CausalMask(segment_ids_BT),
    )  # fmt: skip
    T = source_BT.shape[1]

    @jax.checkpoint
    def block_sum(total: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        visible_BQS = mask.visible(i * BLOCK, BLOCK, 0, T)
        label_BQ, pairs_BQ = (
            lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=1)
            for x in (label_BT, pairs_BT)
        )
        match_BQS = label_BQ[:, :, None] == source_BT[:, None, :]
        match_BQS &= visible_BQS & pairs_BQ[:, :, None]
        score_BGQRS = scores(block(q_BGTRH, i), k_BGTH, visible_BQS)
        no = jnp.finfo(score_BGQRS.dtype).min
        match_BGQRS = jnp.where(match_BQS[:, None, :, None], score_BGQRS, no)
        log_BGQR = jax.nn.logsumexp(match_BGQRS, -1) - jax.nn.logsumexp(score_BGQRS, -1)
        log_BQ = jax.nn.logsumexp(log_BGQR, axis=(1, 3)) - math.log(N)
        return total - jnp.sum(jnp.where(jnp.any(match_BQS, -1), log_BQ, 0.0)), None

    return lax.scan(block_sum, jnp.zeros((), dtype), jnp.arange(T // BLOCK))[0]
