"""Next-token and draft-head losses: which pairs count, how terms are weighed and normalised.

The sums themselves are computed chunk by chunk in `streamed.py`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads import Base, Drafter
from medusa_jax.heads.layers import later
from medusa_jax.training.streamed import (
    Sums,
    Teacher,
    cross_entropy_sums,
    heads_cross_entropy,
)

Params = Any
Batch = dict[str, jax.Array]


class HeadTargets(NamedTuple):
    """What draft heads learn from, and on what.

    Each head's loss is label_weight CE(text) + teacher_weight CE(backbone), the latter against
    the distribution that the backbone has for that same token (Hydra 6.1, Amphista eq. 7-9).
    `noise` is Hydra's (6.1): in training the heads read hidden states plus
    uniform(-1, 1) noise / sqrt(L d).
    """

    label_weight: float = 1.0
    teacher_weight: float = 0.0
    noise: float = 0.0


def delay(x_BT: jax.Array, by: int) -> jax.Array:
    """What stood `by` positions before, 0 ahead of the row: [a b c d], 1 -> [0 a b c]."""
    T = x_BT.shape[1]
    return jnp.pad(x_BT, ((0, 0), (by, 0)) + ((0, 0),) * (x_BT.ndim - 2))[:, :T]


def pair_mask(counted_BT: jax.Array, segment_ids_BT: jax.Array, ahead: int) -> jax.Array:
    """Which positions t have a target at t + ahead: [B, T] bool.

    Tokens t+1 ... t+ahead must all be counted and lie in the segment of t (0 is padding).

    Example, ahead = 2 (the first Medusa head), "u" a user token, A B C . an answer:

        token     u u A B C . | u A .        segments 1 1 1 1 1 1 2 2 2
        counted   0 0 1 1 1 1   0 1 1
        pair      0 1 1 1 0 0   1 0 0        (t = 1 predicts B: A and B are both counted)
    """
    mask = segment_ids_BT != 0
    for step in range(1, ahead + 1):
        inside = later(segment_ids_BT, step) == segment_ids_BT
        mask &= inside & later(counted_BT, step)
    return mask


def pair_counts(batch: Batch, aheads: tuple[int, ...]) -> jax.Array:
    """Number of counted pairs per distance, float32 [len(aheads)].

    Over a batch with leading microbatch axes this is the count that every microbatch divides
    by, so that accumulation weighs all pairs alike.
    """
    T = batch["tokens"].shape[-1]
    counted = batch["counted"].reshape(-1, T)
    segments = batch["segment_ids"].reshape(-1, T)
    counts = [jnp.sum(pair_mask(counted, segments, ahead)) for ahead in aheads]
    return jnp.stack(counts).astype(jnp.float32)


# Splits a tree of variables into head parameters and the backbone they sit on.
Split = Callable[[Params], tuple[Params, Base]]


def rows(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, positions and segments: what a teacher-forced pass reads."""
    return batch["tokens"], batch["positions"], batch["segment_ids"]


def next_token_sums(
    params: Params,
    base_of: Callable[[Params], Base],
    hidden_BTD: jax.Array,
    batch: Batch,
    chunk: int,
    original: Base | None = None,
) -> Sums:
    """The backbone's own loss, from its hidden states [B, T, D].

    With `original` (the backbone as it was) its distribution is the target in place of the
    labels (Medusa 2.3.2).
    """
    teacher, teacher_BTD = None, None
    if original is not None:
        teacher = Teacher(original.lm_head, 1.0, 0.0)
        teacher_BTD = original.forward(*rows(batch))

    def logits(p: Params, hidden: jax.Array) -> Any:
        return base_of(p).lm_head(hidden)

    mask_BT = pair_mask(batch["counted"], batch["segment_ids"], 1)
    labels_BT = later(batch["tokens"], 1)
    return cross_entropy_sums(
        logits, params, hidden_BTD, labels_BT, mask_BT, chunk,
        teacher, teacher_BTD,
    )  # fmt: skip


def next_token_mean(sums: Sums, count: jax.Array) -> jax.Array:
    """L_LM (or the KL): the mean over all tokens that have a loss."""
    return (sums.loss - sums.entropy) / jnp.maximum(count, 1.0)


def backbone_loss(
    params: Params,
    base_of: Callable[[Params], Base],
    batch: Batch,
    counts_K: jax.Array,
    chunk: int,
    original: Base | None = None,
) -> tuple[jax.Array, Sums]:
    """Next-token cross-entropy of packed rows [B, T]; counts_K is `pair_counts(batch, (1,))`.

    Returns: L_LM, and the sums (leading axis of size 1).
    """
    hidden_BTD = base_of(params).forward(*rows(batch))
    sums = next_token_sums(params, base_of, hidden_BTD, batch, chunk, original)
    return next_token_mean(sums, counts_K[0]), jax.tree.map(lambda s: s[None], sums)


def heads_sums(
    params: Params,
    split: Split,
    drafter: Drafter,
    hidden_BTD: jax.Array,
    batch: Batch,
    counts_K: jax.Array,
    chunk: int,
    decay: float,
    dropout_key: jax.Array | None,
    targets: HeadTargets = HeadTargets(),  # noqa: B008 (immutable)
) -> tuple[jax.Array, Sums]:
    """sum_k lambda_k L_k with lambda_k = decay^k: each head's sum over its own count.

    k is 1-based as in the paper, head k looks k + 1 ahead. Everything is laid out by the token
    that is guessed, so that all heads' guesses of a token meet the same label and teacher.

    Returns: that loss, and the sums per head, each [K].
    """
    heads, base = split(params)
    read_BTD = hidden_BTD
    if targets.noise and dropout_key is not None:
        dropout_key, noise_key = jax.random.split(dropout_key)
        read_BTD += hidden_noise(noise_key, hidden_BTD, targets.noise)
    features_KBTD = drafter.features(heads, base, read_BTD, *rows(batch), dropout_key)
    teacher, teacher_BTD, weight = None, None, targets.label_weight
    if targets.teacher_weight:
        frozen: Base = lax.stop_gradient(base)
        teacher = Teacher(frozen.lm_head, targets.teacher_weight, targets.label_weight)
        teacher_BTD = delay(hidden_BTD, 1)  # the hidden state right before the target
        weight = 1.0  # both are the teacher's to weigh
    logits_K, features_K, mask_K, weight_K = [], [], [], []
    for k in range(drafter.n_heads):

        def logits(p: Params, features: jax.Array, k: int = k) -> jax.Array:
            heads, base = split(p)
            return drafter.head_logits(heads, base, k, features)

        ahead = k + 2
        mask_BT = pair_mask(batch["counted"], batch["segment_ids"], ahead)
        logits_K.append(logits)
        features_K.append(delay(features_KBTD[k], ahead))
        mask_K.append(delay(mask_BT, ahead))
        weight_K.append(weight * decay ** (k + 1) / jnp.maximum(counts_K[k], 1.0))
    return heads_cross_entropy(
        logits_K, params, jnp.stack(weight_K), features_K, batch["tokens"], mask_K, chunk,
        teacher, teacher_BTD,
    )  # fmt: skip


def hidden_noise(key: jax.Array, hidden_BTD: jax.Array, alpha: float) -> jax.Array:
    """uniform(-1, 1) alpha / sqrt(L d) (Hydra 6.1, after Jain et al. 2024)."""
    scale = alpha / math.sqrt(hidden_BTD.shape[1] * hidden_BTD.shape[2])
    return scale * jax.random.uniform(key, hidden_BTD.shape, hidden_BTD.dtype, -1, 1)


def hidden_states(base: Base, batch: Batch) -> jax.Array:
    """[B, T, D] of a backbone that does not change: from the batch if they were cached."""
    if "hidden" in batch:  # data.cache_features
        return batch["hidden"].astype(base.llama.dtype)
    return base.forward(*rows(batch))


def head_loss(
    params: Params,
    drafter: Drafter,
    base: Base,
    batch: Batch,
    counts_K: jax.Array,
    chunk: int,
    decay: float,
    dropout_key: jax.Array | None = None,
    targets: HeadTargets = HeadTargets(),  # noqa: B008 (immutable)
) -> tuple[jax.Array, Sums]:
    """Medusa-1 (Medusa 2.2.1, equation 1): L = sum_k lambda_k CE_k, lambda_k = decay^k.

    The backbone runs once, outside the gradient. `counts_K` is `pair_counts(batch, 2 ... K+1)`
    over the global batch.

    Returns: L, and the sums per head, each [K].
    """
    hidden_BTD = lax.stop_gradient(hidden_states(base, batch))
    return heads_sums(
        params, lambda p: (p, base), drafter, hidden_BTD, batch, counts_K, chunk, decay,
        dropout_key, targets,
    )  # fmt: skip


def joint_loss(
    params: Params,
    split: Split,
    drafter: Drafter,
    batch: Batch,
    counts_K: jax.Array,
    lambda_0: jax.Array,
    chunk: int,
    decay: float,
    original: Base | None = None,
    dropout_key: jax.Array | None = None,
    targets: HeadTargets = HeadTargets(),  # noqa: B008 (immutable)
) -> tuple[jax.Array, Sums]:
    """Medusa-2 (Medusa 2.2.2, equation 2): L = L_LM + lambda_0 sum_k lambda_k L_k.

    One pass of the backbone serves both terms, and the heads' gradient flows into it.
    `counts_K` is `pair_counts(batch, (1, 2 ... K+1))` over the global batch.

    Returns: L, and the sums, each [1 + K]: the backbone's own first.
    """
    hidden_BTD = split(params)[1].forward(*rows(batch))
    own = next_token_sums(params, lambda p: split(p)[1], hidden_BTD, batch, chunk, original)
    heads_loss, heads = heads_sums(
        params, split, drafter, hidden_BTD, batch, counts_K[1:], chunk, decay,
        dropout_key, targets,
    )  # fmt: skip
    loss = next_token_mean(own, counts_K[0]) + lambda_0 * heads_loss
    return loss, jax.tree.map(lambda s, t: jnp.concatenate([s[None], t]), own, heads)
