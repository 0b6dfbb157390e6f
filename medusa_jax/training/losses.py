"""Next-token and draft-head losses, walked in chunks of target positions.

Which pairs count, how a loss is normalised and how it is computed without ever holding the
logits of more than one chunk of one head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads import Base, Drafter

Params = Any
Batch = dict[str, jax.Array]
LogitsFn = Callable[[Params, jax.Array], jax.Array]


class Sums(NamedTuple):
    """Sums over the pairs of a loss. Only `loss` has a gradient, the others are for the log.

    Attributes:
      loss: what is minimised: `nll`, or what `Teacher` makes of it, plus, where asked for,
        weighted `unlikelihood`.
      nll: cross-entropy of the counted pairs in nats.
      top1, top5: counted pairs whose label is ranked first, among the first five.
      unlikelihood: -log(1 - p(label)) of the marked pairs.
      entropy: the teacher's, in nats: its cross-entropy less this is KL(teacher || student).
    """

    loss: jax.Array
    nll: jax.Array
    top1: jax.Array
    top5: jax.Array
    unlikelihood: jax.Array
    entropy: jax.Array


class Teacher(NamedTuple):
    """A distribution to learn from, beside the labels.

    Attributes:
      logits_fn: (features) -> logits of the teacher, no gradient.
      weight, label_weight: of its cross-entropy and of the labels'.
    """

    logits_fn: Callable[[jax.Array], jax.Array]
    weight: float
    label_weight: float


class Counts(NamedTuple):
    """What sums are divided by, over the whole batch: pairs per distance [K], marked pairs []."""

    pairs_K: jax.Array
    marked: jax.Array


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


def shift(x_BT: jax.Array, ahead: int) -> jax.Array:
    """What stands `ahead` positions later, 0 past the end: [a b c d], 1 -> [b c d 0]."""
    kept = x_BT[:, ahead:]
    pad = ((0, 0), (0, x_BT.shape[1] - kept.shape[1])) + ((0, 0),) * (x_BT.ndim - 2)
    return jnp.pad(kept, pad)


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
        inside = shift(segment_ids_BT, step) == segment_ids_BT
        mask &= inside & (shift(counted_BT.astype(jnp.int32), step) > 0)
    return mask


def marked_mask(counted_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Positions whose next token is marked as unwanted (counted is -1): [B, T] bool."""
    inside = shift(segment_ids_BT, 1) == segment_ids_BT
    marked = shift(counted_BT.astype(jnp.int32), 1) < 0
    return (segment_ids_BT != 0) & inside & marked


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


def all_counts(batch: Batch, aheads: tuple[int, ...]) -> Counts:
    """`pair_counts`, and the number of pairs that `marked_mask` finds."""
    T = batch["tokens"].shape[-1]
    counted, segments = (batch[x].reshape(-1, T) for x in ("counted", "segment_ids"))
    marked = jnp.sum(marked_mask(counted, segments)).astype(jnp.float32)
    return Counts(pair_counts(batch, aheads), marked)


def cross_entropy_sums(
    logits_fn: LogitsFn,
    params: Params,
    features_BTD: jax.Array,
    labels_BT: jax.Array,
    mask_BT: jax.Array,
    chunk: int,
    teacher: Teacher | None = None,
    teacher_BTD: jax.Array | None = None,
    unlikelihood: float = 0.0,
) -> Sums:
    """Sums of `logits_fn(params, features)` against the labels, `chunk` positions at a time.

    `mask_BT` is 1 (or True) where the label counts and -1 where it is an unwanted token, whose
    loss is `unlikelihood` * -log(1 - p(label)) (Welleck et al. 2020, equation 2).

    The gradient of a sum is known as soon as its chunk is, so the forward pass takes it right
    there and keeps only d(features) and the running d(params): nothing is recomputed in the
    backward pass, and one chunk of logits [B, chunk, V] is all that exists of them. Only the
    loss has a gradient; the two accuracies are counts.
    """
    leaves, treedef = jax.tree.flatten(params)
    used = _used_leaves(logits_fn, params, features_BTD[:, :1])

    def fn(used_leaves: list[jax.Array], features: jax.Array) -> jax.Array:
        given = iter(used_leaves)
        full = [next(given) if use else leaf for use, leaf in zip(used, leaves)]
        return logits_fn(jax.tree.unflatten(treedef, full), features)

    differentiated = [leaf for use, leaf in zip(used, leaves) if use]
    # The unused ones enter `fn` by closure and must not carry a tangent.
    leaves = [lax.stop_gradient(leaf) for leaf in leaves]
    rows = (features_BTD, labels_BT, mask_BT.astype(jnp.int8))
    options = (chunk, teacher, unlikelihood)
    return _streamed(fn, options, differentiated, *rows, lax.stop_gradient(teacher_BTD))


def _used_leaves(fn: LogitsFn, params: Params, features: jax.Array) -> list[bool]:
    """Which parameters the logits depend on; the others get no gradient accumulator."""
    jaxpr = jax.make_jaxpr(fn)(params, features).jaxpr
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars} | {
        id(v) for v in jaxpr.outvars
    }
    return [id(v) in read for v in jaxpr.invars[: len(jax.tree.leaves(params))]]


def _chunk_sums(
    fn: LogitsFn,
    params: Params,
    features_BTD: jax.Array,
    labels_BT: jax.Array,
    mask_BT: jax.Array,
    teacher_BTD: jax.Array | None,
    teacher: Teacher | None,
    unlikelihood: float,
) -> tuple[jax.Array, Sums]:
    logits_BTV = fn(params, features_BTD)
    label_BT1 = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)
    log_sum_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    nll_BT = log_sum_BT - label_BT1[..., 0]
    # The label's rank by counting: no sort, no top-k.
    rank_BT = jnp.sum(lax.stop_gradient(logits_BTV > label_BT1), axis=-1)
    counted_BT = mask_BT > 0
    nll = jnp.sum(jnp.where(counted_BT, nll_BT, 0.0))
    top1 = jnp.sum((counted_BT & (rank_BT == 0)).astype(jnp.float32))
    top5 = jnp.sum((counted_BT & (rank_BT < 5)).astype(jnp.float32))
    total, marked, entropy = nll, jnp.zeros_like(nll), jnp.zeros_like(nll)
    if teacher is not None:
        assert teacher_BTD is not None
        logp_BTV = jax.nn.log_softmax(lax.stop_gradient(teacher.logits_fn(teacher_BTD)))
        p_BTV = jnp.exp(logp_BTV)
        soft_BT = log_sum_BT - jnp.sum(p_BTV * logits_BTV, axis=-1)
        soft = jnp.sum(jnp.where(counted_BT, soft_BT, 0.0))
        total = teacher.label_weight * nll + teacher.weight * soft
        entropy_BT = -jnp.sum(p_BTV * logp_BTV, axis=-1)
        entropy = jnp.sum(jnp.where(counted_BT, entropy_BT, 0.0))
    if unlikelihood:
        # -log(1 - p) from -log p. The value is held off p = 1, the gradient passes.
        safe_BT = nll_BT + lax.stop_gradient(jnp.maximum(nll_BT, 1e-5) - nll_BT)
        marked = jnp.sum(jnp.where(mask_BT < 0, -jnp.log(-jnp.expm1(-safe_BT)), 0.0))
        total += unlikelihood * marked
    return total, Sums(total, nll, top1, top5, marked, entropy)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk, B, chunk, ...], T padded with zeros to a multiple."""
    B, T = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -T % chunk)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _streamed(fn, options, params, *rows):  # type: ignore[no-untyped-def]
    chunk, *rest = options

    def body(_, xs):  # type: ignore[no-untyped-def]
        return None, _chunk_sums(fn, params, *xs, *rest)[1]

    chunks = jax.tree.map(partial(_split, chunk=chunk), rows)
    _, sums = lax.scan(body, None, chunks)
    return jax.tree.map(jnp.sum, sums)


def _streamed_fwd(fn, options, params, *rows):  # type: ignore[no-untyped-def]
    chunk, *rest = options

    def body(d_params, xs):  # type: ignore[no-untyped-def]
        value = partial(_chunk_sums, fn)
        gradient = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)
        (_, sums), (dp, df) = gradient(params, *xs, *rest)
        return jax.tree.map(jnp.add, d_params, dp), (sums, df)

    chunks = jax.tree.map(partial(_split, chunk=chunk), rows)
    zeros = jax.tree.map(jnp.zeros_like, params)
    d_params, (sums, df) = lax.scan(body, zeros, chunks)
    B, T, D = rows[0].shape
    d_features_BTD = jnp.moveaxis(df, 0, 1).reshape(B, -1, D)[:, :T]
    return jax.tree.map(jnp.sum, sums), (d_params, d_features_BTD)


def _streamed_bwd(fn, options, residuals, cotangents):  # type: ignore[no-untyped-def]
    scale = cotangents.loss
    d_params, d_features = jax.tree.map(lambda g: (g * scale).astype(g.dtype), residuals)
    return d_params, d_features, None, None, None


_streamed.defvjp(_streamed_fwd, _streamed_bwd)


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
    unlikelihood: float,
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

    counted, segments = batch["counted"], batch["segment_ids"]
    mask_BT = pair_mask(counted, segments, 1).astype(jnp.int8)
    mask_BT -= marked_mask(counted, segments)
    labels_BT = shift(batch["tokens"], 1)
    return cross_entropy_sums(
        logits, params, hidden_BTD, labels_BT, mask_BT, chunk,
        teacher, teacher_BTD, unlikelihood,
    )  # fmt: skip


def next_token_mean(sums: Sums, counts: Counts) -> jax.Array:
    """L_LM (or the KL): the mean over all tokens that have a loss, wanted or not."""
    return (sums.loss - sums.entropy) / jnp.maximum(counts.pairs_K[0] + counts.marked, 1.0)


def backbone_loss(
    params: Params,
    base_of: Callable[[Params], Base],
    batch: Batch,
    counts: Counts,
    chunk: int,
    unlikelihood: float = 0.0,
    original: Base | None = None,
) -> tuple[jax.Array, Sums]:
    """Next-token cross-entropy of packed rows [B, T]; counts is `all_counts(batch, (1,))`.

    Returns: L_LM, and the sums (leading axis of size 1).
    """
    hidden_BTD = base_of(params).forward(*rows(batch))
    sums = next_token_sums(
        params, base_of, hidden_BTD, batch, chunk, unlikelihood, original
    )
    return next_token_mean(sums, counts), jax.tree.map(lambda s: s[None], sums)


def heads_sums(
    params: Params,
    split: Split,
    drafter: Drafter,
    hidden_BTD: jax.Array,
    batch: Batch,
    chunk: int,
    dropout_key: jax.Array | None,
    targets: HeadTargets = HeadTargets(),  # noqa: B008 (immutable)
) -> list[Sums]:
    """Each head's cross-entropy; k is 1-based as in the paper, head k looks k + 1 ahead."""
    heads, base = split(params)
    read_BTD = hidden_BTD
    if targets.noise and dropout_key is not None:
        dropout_key, noise_key = jax.random.split(dropout_key)
        read_BTD += hidden_noise(noise_key, hidden_BTD, targets.noise)
    features_KBTD = drafter.features(heads, base, read_BTD, *rows(batch), dropout_key)
    teacher, sums_K = None, []
    if targets.teacher_weight or targets.label_weight != 1:
        frozen: Base = lax.stop_gradient(base)
        teacher = Teacher(frozen.lm_head, targets.teacher_weight, targets.label_weight)
    for k in range(drafter.n_heads):

        def logits(p: Params, features: jax.Array, k: int = k) -> jax.Array:
            heads, base = split(p)
            return drafter.head_logits(heads, base, k, features)

        ahead = k + 2
        mask_BT = pair_mask(batch["counted"], batch["segment_ids"], ahead)
        labels_BT = shift(batch["tokens"], ahead)
        # The backbone's hidden state right before the target.
        teacher_BTD = None if teacher is None else shift(hidden_BTD, ahead - 1)
        targets_k = (labels_BT, mask_BT, chunk, teacher, teacher_BTD)
        sums_K.append(cross_entropy_sums(logits, params, features_KBTD[k], *targets_k))
    return sums_K


def hidden_noise(key: jax.Array, hidden_BTD: jax.Array, alpha: float) -> jax.Array:
    """uniform(-1, 1) alpha / sqrt(L d) (Hydra 6.1, after Jain et al. 2024)."""
    scale = alpha / math.sqrt(hidden_BTD.shape[1] * hidden_BTD.shape[2])
    return scale * jax.random.uniform(key, hidden_BTD.shape, hidden_BTD.dtype, -1, 1)


def weighted_heads(sums_K: list[Sums], counts_K: jax.Array, decay: float) -> jax.Array:
    """sum_k lambda_k L_k with lambda_k = decay^k: each head's sum over its own count."""
    total = jnp.zeros(())
    for k, sums in enumerate(sums_K):
        total += decay ** (k + 1) * sums.loss / jnp.maximum(counts_K[k], 1.0)
    return total


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
    sums_K = heads_sums(
        params, lambda p: (p, base), drafter, hidden_BTD, batch, chunk, dropout_key, targets
    )
    loss = weighted_heads(sums_K, counts_K, decay)
    return loss, jax.tree.map(lambda *s: jnp.stack(s), *sums_K)


def joint_loss(
    params: Params,
    split: Split,
    drafter: Drafter,
    batch: Batch,
    counts: Counts,
    lambda_0: jax.Array,
    chunk: int,
    decay: float,
    unlikelihood: float = 0.0,
    original: Base | None = None,
    dropout_key: jax.Array | None = None,
    targets: HeadTargets = HeadTargets(),  # noqa: B008 (immutable)
) -> tuple[jax.Array, Sums]:
    """Medusa-2 (Medusa 2.2.2, equation 2): L = L_LM + lambda_0 sum_k lambda_k L_k.

    One pass of the backbone serves both terms, and the heads' gradient flows into it.
    `counts` is `all_counts(batch, (1, 2 ... K+1))` over the global batch.

    Returns: L, and the sums, each [1 + K]: the backbone's own first.
    """
    hidden_BTD = split(params)[1].forward(*rows(batch))
    own = next_token_sums(
        params, lambda p: split(p)[1], hidden_BTD, batch, chunk, unlikelihood, original
    )
    heads = heads_sums(
        params, split, drafter, hidden_BTD, batch, chunk, dropout_key, targets
    )
    loss = next_token_mean(own, counts)
    loss += lambda_0 * weighted_heads(heads, counts.pairs_K[1:], decay)
    return loss, jax.tree.map(lambda *s: jnp.stack(s), own, *heads)
