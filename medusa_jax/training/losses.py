"""Next-token and draft-head losses, walked in chunks of target positions.

Which pairs count, how a loss is normalised and how it is computed without ever holding the
logits of more than one chunk of one head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from medusa_jax.heads import Base, Drafter
from medusa_jax.model.llama import Llama

Params = Any
Batch = dict[str, jax.Array]
LogitsFn = Callable[[Params, jax.Array], jax.Array]


class Sums(NamedTuple):
    """Sums over the counted pairs: cross-entropy in nats, label ranked first, in the first 5."""

    loss: jax.Array
    top1: jax.Array
    top5: jax.Array


def shift(x_BT: jax.Array, ahead: int) -> jax.Array:
    """What stands `ahead` positions later, 0 past the end: [a b c d], 1 -> [b c d 0]."""
    kept = x_BT[:, ahead:]
    return jnp.pad(kept, ((0, 0), (0, x_BT.shape[1] - kept.shape[1])))


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
        mask &= inside & (shift(counted_BT.astype(jnp.int32), step) != 0)
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


def cross_entropy_sums(
    logits_fn: LogitsFn,
    params: Params,
    features_BTD: jax.Array,
    labels_BT: jax.Array,
    mask_BT: jax.Array,
    chunk: int,
) -> Sums:
    """Sums of `logits_fn(params, features)` against the labels, `chunk` positions at a time.

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
    return Sums(*_streamed(fn, chunk, differentiated, features_BTD, labels_BT, mask_BT))


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
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    logits_BTV = fn(params, features_BTD)
    label_BT1 = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)
    loss_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - label_BT1[..., 0]
    # The label's rank by counting: no sort, no top-k.
    rank_BT = jnp.sum(lax.stop_gradient(logits_BTV > label_BT1), axis=-1)
    total = jnp.sum(jnp.where(mask_BT, loss_BT, 0.0))
    top1 = jnp.sum((mask_BT & (rank_BT == 0)).astype(jnp.float32))
    top5 = jnp.sum((mask_BT & (rank_BT < 5)).astype(jnp.float32))
    return total, (top1, top5)


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk, B, chunk, ...], T padded with zeros to a multiple."""
    B, T = x.shape[:2]
    x = jnp.pad(x, ((0, 0), (0, -T % chunk)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _streamed(fn, chunk, params, features_BTD, labels_BT, mask_BT):  # type: ignore[no-untyped-def]
    def body(_, xs):  # type: ignore[no-untyped-def]
        total, (top1, top5) = _chunk_sums(fn, params, *xs)
        return None, (total, top1, top5)

    chunks = tuple(_split(x, chunk) for x in (features_BTD, labels_BT, mask_BT))
    _, sums = lax.scan(body, None, chunks)
    return tuple(jnp.sum(s) for s in sums)


def _streamed_fwd(fn, chunk, params, features_BTD, labels_BT, mask_BT):  # type: ignore[no-untyped-def]
    def body(d_params, xs):  # type: ignore[no-untyped-def]
        features, labels, mask = xs
        value = partial(_chunk_sums, fn)
        (total, tops), (dp, df) = jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(
            params, features, labels, mask
        )
        return jax.tree.map(jnp.add, d_params, dp), ((total, *tops), df)

    chunks = tuple(_split(x, chunk) for x in (features_BTD, labels_BT, mask_BT))
    zeros = jax.tree.map(jnp.zeros_like, params)
    d_params, (sums, df) = lax.scan(body, zeros, chunks)
    B, T, D = features_BTD.shape
    d_features_BTD = jnp.moveaxis(df, 0, 1).reshape(B, -1, D)[:, :T]
    return tuple(jnp.sum(s) for s in sums), (d_params, d_features_BTD)


def _streamed_bwd(fn, chunk, residuals, cotangents):  # type: ignore[no-untyped-def]
    scale = cotangents[0]
    d_params, d_features = jax.tree.map(lambda g: (g * scale).astype(g.dtype), residuals)
    return d_params, d_features, None, None


_streamed.defvjp(_streamed_fwd, _streamed_bwd)


def backbone_loss(
    params: Params, llama: Llama, batch: Batch, counts_K: jax.Array, chunk: int
) -> tuple[jax.Array, Sums]:
    """Next-token cross-entropy of packed rows [B, T]; counts_K is `pair_counts(batch, (1,))`.

    Returns: the mean over counted pairs, and the sums (leading axis of size 1).
    """
    hidden_BTD: Any = llama.apply(
        {"params": params},
        batch["tokens"],
        batch["positions"],
        batch["segment_ids"],
        method="forward",
    )

    def logits(p: Params, hidden: jax.Array) -> Any:
        return llama.apply({"params": p}, hidden, method="lm_head")

    mask_BT = pair_mask(batch["counted"], batch["segment_ids"], 1)
    labels_BT = shift(batch["tokens"], 1)
    sums = cross_entropy_sums(logits, params, hidden_BTD, labels_BT, mask_BT, chunk)
    loss = sums.loss / jnp.maximum(counts_K[0], 1.0)
    return loss, jax.tree.map(lambda s: s[None], sums)


def head_loss(
    params: Params,
    drafter: Drafter,
    base: Base,
    batch: Batch,
    counts_K: jax.Array,
    chunk: int,
    decay: float,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Sums]:
    """Medusa-1 (Medusa 2.2.1, equation 1): L = sum_k lambda_k CE_k, lambda_k = decay^k.

    k is 1-based as in the paper: head k at position t is scored on token t + k + 1. The
    backbone runs once, outside the gradient. `counts_K` is `pair_counts(batch, 2 ... K+1)`
    over the global batch; each head's loss is its sum over its own count.

    Returns: L, and the sums per head, each [K].
    """
    rows = (batch["tokens"], batch["positions"], batch["segment_ids"])
    hidden: Any = base.llama.apply({"params": base.params}, *rows, method="forward")
    hidden_BTD = lax.stop_gradient(hidden)
    features_KBTD = drafter.features(params, base, hidden_BTD, *rows, dropout_key)
    loss, all_sums = jnp.zeros(()), []
    for k in range(drafter.n_heads):

        def logits(p: Params, features: jax.Array, k: int = k) -> jax.Array:
            return drafter.head_logits(p, base, k, features)

        ahead = k + 2
        mask_BT = pair_mask(batch["counted"], batch["segment_ids"], ahead)
        labels_BT = shift(batch["tokens"], ahead)
        sums = cross_entropy_sums(
            logits, params, features_KBTD[k], labels_BT, mask_BT, chunk
        )
        loss += decay ** (k + 1) * sums.loss / jnp.maximum(counts_K[k], 1.0)
        all_sums.append(sums)
    return loss, jax.tree.map(lambda *s: jnp.stack(s), *all_sums)
