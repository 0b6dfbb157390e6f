"""The pairs of a position and a later token that count, and a loss's inputs and results."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads.drafter import shift_left

Batch = dict[str, jax.Array]


class StepInputs(NamedTuple):
    """The inputs of a loss at one step.

    Attributes:
      batch: rows [B, T], one microbatch.
      counts_K: `pair_counts` over the whole global batch, one per loss.
      dropout_key: None disables dropout and noise.
      lambda_0: weight of the heads' loss if it is one of two terms (Medusa equation 2).
    """

    batch: Batch
    counts_K: jax.Array
    dropout_key: jax.Array | None = None
    lambda_0: jax.Array | float = 1.0


class Sums(NamedTuple):
    """Sums over the pairs of a loss. Only `loss` has a gradient; the others are logged.

    Attributes:
      loss: the minimised sum, of all terms that read logits.
      nll: cross-entropy of the counted pairs in nats.
      top1, top5: counted pairs whose label is ranked first, or among the first five.
      scored: counted pairs whose label has a logit (without a draft vocabulary, all).
      entropy: the teacher's, in nats; cross-entropy minus entropy is KL(teacher || student).
    """

    loss: jax.Array
    nll: jax.Array
    top1: jax.Array
    top5: jax.Array
    scored: jax.Array
    entropy: jax.Array


def text_of(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, positions and segments: the inputs of a teacher-forced pass."""
    return batch["tokens"], batch["positions"], batch["segment_ids"]


def delay(x_BT: jax.Array, by: int) -> jax.Array:
    """Shift right by `by` positions, filled with 0: [a b c d], 1 -> [0 a b c]."""
    T = x_BT.shape[1]
    return jnp.pad(x_BT, ((0, 0), (by, 0)) + ((0, 0),) * (x_BT.ndim - 2))[:, :T]


def pair_mask(counted_BT: jax.Array, segment_ids_BT: jax.Array, ahead: int) -> jax.Array:
    """Positions t with a target at t + ahead: [B, T] bool.

    Tokens t+1 ... t+ahead must all be counted and in the segment of t (0 is padding).

    Example, ahead = 2 (the first Medusa head), "u" a user token, A B C . an answer:

        token     u u A B C . | u A .        segments 1 1 1 1 1 1 2 2 2
        counted   0 0 1 1 1 1   0 1 1
        pair      0 1 1 1 0 0   1 0 0        (t = 1 predicts B: A and B are both counted)
    """
    mask = segment_ids_BT != 0
    for step in range(1, ahead + 1):
        same_segment = shift_left(segment_ids_BT, step) == segment_ids_BT
        mask &= same_segment & shift_left(counted_BT, step)
    return mask


def draw_anchors(key: jax.Array, batch: Batch, n: int) -> jax.Array:
    """n random positions of every row with a pair at distance 2, ascending: [..., n] int32.

    If a row has fewer, other positions follow, none of them with such a pair. Drawing by the first
    guess's label keeps the position before an answer, from which its first token is guessed.
    """
    T = batch["tokens"].shape[-1]
    counted_BT, segments_BT = (batch[x].reshape(-1, T) for x in ("counted", "segment_ids"))
    valid_BT = pair_mask(counted_BT, segments_BT, 2)
    order_BT = jax.random.uniform(key, valid_BT.shape) + valid_BT
    index_BA = jnp.sort(lax.top_k(order_BT, min(n, T))[1], axis=1)
    return index_BA.reshape(*batch["tokens"].shape[:-1], -1)


def pair_counts(batch: Batch, offsets: tuple[int, ...]) -> jax.Array:
    """Number of counted pairs per distance, float32 [len(offsets)]; only those at anchors, if drawn.

    `batch` may have leading microbatch axes: every microbatch divides by the whole batch's count, so that
    accumulation weights all pairs equally.
    """
    T = batch["tokens"].shape[-1]
    counted = batch["counted"].reshape(-1, T)
    segments = batch["segment_ids"].reshape(-1, T)
    masks = [pair_mask(counted, segments, ahead) for ahead in offsets]
    if "anchors" in batch:
        index_BA = batch["anchors"].reshape(len(counted), -1)
        masks = [jnp.take_along_axis(mask, index_BA, axis=1) for mask in masks]
    return jnp.stack([jnp.sum(mask) for mask in masks]).astype(jnp.float32)
