"""Teaches a drafter's attention to find where the next token occurred before (an induction head).

A language model repeats names, phrases and whole sentences of its text. Attention can copy them if it looks for
the place where the same tokens stood before and takes the token after it (Olsson et al. 2022, "In-context learning
and induction heads"). A single layer can do this if it reads [e_{s+1} ; f_s]: the hidden state f_s at token s tells
which tokens came before e_{s+1}. The other terms of the loss hardly teach it to draft heads: they reward the
copied token only once attention, values and output fit together. So this term rewards the attention alone.
"""

import math

import jax
import jax.numpy as jnp

from medusa_jax.heads.layers import shift_left
from medusa_jax.model.causal import BLOCK, CausalMask, grouped, scores
from medusa_jax.model.product import at_least_f32
from medusa_jax.training.losses.targets import Batch, pair_mask


def induction_sum(q_BTNH: jax.Array, k_BGTH: jax.Array, batch: Batch) -> jax.Array:
    """Sum of -log(mean attention, over the heads, to rows whose token is the one to predict).

    Row t reads tokens up to t + 1 and predicts token t + 2, so it should attend to the rows s <= t whose
    token s + 1 is that token. Rows without such an s do not count. Of the mean, not of each head: some
    heads may attend elsewhere.

        token          a b c a b c      row 2 (reads a, predicts b) should attend to row 0 (reads b)
        row            0 1 2 3          row 3 (reads b, predicts c) to row 1 (reads c)

    Args:
      q_BTNH, k_BGTH: queries and keys of a layer, rotated.
    """
    tokens_BT, segment_ids_BT = batch["tokens"], batch["segment_ids"]
    mask = CausalMask(segment_ids_BT)
    given_BT, wanted_BT = shift_left(tokens_BT, 1), shift_left(tokens_BT, 2)
    counted_BT = pair_mask(batch["counted"], segment_ids_BT, 2)
    T, N, G = *q_BTNH.shape[1:3], k_BGTH.shape[1]
    q_BGTRH = grouped(q_BTNH, G)
    total = jnp.zeros((), at_least_f32(q_BTNH.dtype))

    @jax.checkpoint
    def block_sum(q_BGQRH: jax.Array, k_BGSH: jax.Array, right_BQS: jax.Array) -> jax.Array:
        Q, S = right_BQS.shape[1:]
        score_BGQRS = scores(q_BGQRH, k_BGSH, mask.visible(S - Q, Q, 0, S))
        no = jnp.finfo(score_BGQRS.dtype).min
        right_BGQRS = jnp.where(right_BQS[:, None, :, None], score_BGQRS, no)
        log_BGQR = jax.nn.logsumexp(right_BGQRS, -1) - jax.nn.logsumexp(score_BGQRS, -1)
        log_BQ = jax.nn.logsumexp(log_BGQR, axis=(1, 3)) - math.log(N)
        return -jnp.sum(jnp.where(jnp.any(right_BQS, -1), log_BQ, 0.0))

    for begin in range(0, T, BLOCK):
        end = min(begin + BLOCK, T)
        rows = slice(begin, end)
        right_BQS = wanted_BT[:, rows, None] == given_BT[:, None, :end]
        right_BQS &= mask.visible(begin, end - begin, 0, end) & counted_BT[:, rows, None]
        total += block_sum(q_BGTRH[:, :, rows], k_BGTH[:, :, :end], right_BQS)
    return total
