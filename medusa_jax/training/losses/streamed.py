"""Cross-entropies of several heads, computed in chunks of target positions.

Only the logits of one chunk of one head exist at a time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from medusa_jax.model.barrier import completion_of, depend_on
from medusa_jax.model.product import at_least_f32
from medusa_jax.sharding import PyTree, path_string, spec_for, split_rows
from medusa_jax.training.losses import Sums
from medusa_jax.training.losses.packing import Rows, RowSplit, columns, pack

# (parameters, features) -> logits, or logits and the logit of their confidence (`Teacher`).
LogitsFn = Callable[[PyTree, jax.Array], jax.Array | tuple[jax.Array, jax.Array]]


class Teacher(NamedTuple):
    """A distribution to learn from, in addition to the labels.

    Attributes:
      logits_fn: features -> logits of the teacher, without gradient.
      weight, label_weight: weights of its cross-entropy and of the labels'.
      distance_weight: weight of the L1 distance of the probabilities. One minus half the distance is the
        probability that rejection sampling accepts a draft.
      confidence_weight: weight of the binary cross-entropy of a head's confidence with that probability.
    """

    logits_fn: Callable[[jax.Array], jax.Array]
    weight: float
    label_weight: float
    distance_weight: float = 0.0
    confidence_weight: float = 0.0


class TeacherProbs(NamedTuple):
    """The teacher's distribution over a chunk of targets: p [B, T, V], its entropy [B, T]."""

    p_BTV: jax.Array
    entropy_BT: jax.Array


def heads_cross_entropy(
    logits_fns: Sequence[LogitsFn],
    params: PyTree,
    weight_K: jax.Array,
    features_K: Sequence[jax.Array],
    labels_BT: jax.Array,
    mask_K: Sequence[jax.Array],
    chunk: int,
    teacher: Teacher | None = None,
    teacher_BTD: jax.Array | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Sums]:
    """sum_k weight_k loss_k of K heads against the same labels, `chunk` positions at a time.

    The logits of head k are `logits_fns[k](params, features)`; the other arrays as in `Rows`.

    The forward pass computes the gradient of each chunk and keeps only d(features) and the running d(params).
    The backward pass therefore recomputes nothing, and only one chunk of one head's logits [B, chunk, V]
    exists at a time, in addition to the teacher's.

    On a mesh every device sums its own rows; these sums are added once, at the end (`RowSplit`).

    Returns: the weighted loss, and the sums per head, each [K], without gradients.
    """
    leaves, treedef = jax.tree.flatten(params)
    specs = [spec_for(path_string(p)) for p, _ in jax.tree.leaves_with_path(params)]
    heads = []
    # Parameters that no head reads are constants of the closure, without gradient.
    constants = [lax.stop_gradient(leaf) for leaf in leaves]
    for logits_fn, features_BTD in zip(logits_fns, features_K, strict=True):
        used = _used_leaves(logits_fn, params, features_BTD[:, :1])

        def fn(
            read_params: list[jax.Array],
            features: jax.Array,
            used: list[int] = used,
            logits_fn: LogitsFn = logits_fn,
        ) -> jax.Array | tuple[jax.Array, jax.Array]:
            full = list(constants)
            for i, leaf in zip(used, read_params, strict=True):
                full[i] = leaf
            return logits_fn(jax.tree.unflatten(treedef, full), features)

        heads.append((fn, used))
    read = sorted({i for _, used in heads for i in used})
    plan = LossPlan(
        [Head(fn, [read.index(i) for i in used]) for fn, used in heads],
        chunk,
        teacher,
        RowSplit.of(mesh, labels_BT.shape[0], [specs[i] for i in read]),
    )
    # Otherwise every chunk would gather vectors that are split over the tensor axis.
    features = tuple(split_rows(mesh, x) for x in features_K)
    if teacher_BTD is not None:
        teacher_BTD = split_rows(mesh, lax.stop_gradient(teacher_BTD))
    rows = Rows(features, labels_BT, tuple(mask_K), teacher_BTD)
    return _streamed(plan, [leaves[i] for i in read], weight_K, rows)


def _used_leaves(fn: LogitsFn, params: PyTree, features: jax.Array) -> list[int]:
    """Indices of the parameters that the logits depend on; others need no gradient."""
    jaxpr = jax.make_jaxpr(fn)(params, features).jaxpr
    read = {id(v) for v in jaxpr.outvars}
    for eqn in reversed(jaxpr.eqns):
        if any(id(v) in read for v in eqn.outvars):
            read |= {id(v) for v in eqn.invars}
    inputs = jaxpr.invars[: len(jax.tree.leaves(params))]
    return [i for i, v in enumerate(inputs) if id(v) in read]


def _teacher_probs(
    teacher: Teacher | None, teacher_BTD: jax.Array | None
) -> TeacherProbs | None:
    """The teacher's distribution, shared by all heads."""
    if teacher is None:
        return None
    assert teacher_BTD is not None
    logp_BTV = jax.nn.log_softmax(lax.stop_gradient(teacher.logits_fn(teacher_BTD)))
    p_BTV = jnp.exp(logp_BTV)
    return TeacherProbs(p_BTV, -jnp.sum(p_BTV * logp_BTV, axis=-1))


def _chunk_sums(
    fn: LogitsFn,
    params: PyTree,
    features_BTD: jax.Array,
    labels_BT: jax.Array,
    mask_BT: jax.Array,
    probs: TeacherProbs | None,
    teacher: Teacher | None,
) -> Sums:
    out = fn(params, features_BTD)
    logits_BTV, confidence_BT = out if isinstance(out, tuple) else (out, None)
    label_BT1 = jnp.take_along_axis(logits_BTV, labels_BT[..., None], axis=-1)
    log_sum_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    nll_BT = log_sum_BT - label_BT1[..., 0]
    # The label's rank by counting is cheaper than a sort or top-k.
    rank_BT = jnp.sum(lax.stop_gradient(logits_BTV > label_BT1), axis=-1)
    nll = jnp.sum(jnp.where(mask_BT, nll_BT, 0.0))
    top1 = jnp.sum((mask_BT & (rank_BT == 0)).astype(jnp.float32))
    top5 = jnp.sum((mask_BT & (rank_BT < 5)).astype(jnp.float32))
    scored = jnp.sum(mask_BT.astype(jnp.float32))
    total, entropy = nll, jnp.zeros_like(nll)
    if teacher is not None:
        assert probs is not None
        soft_BT = log_sum_BT - jnp.sum(probs.p_BTV * logits_BTV, axis=-1)
        soft = jnp.sum(jnp.where(mask_BT, soft_BT, 0.0))
        total = teacher.label_weight * nll + teacher.weight * soft
        if teacher.distance_weight or confidence_BT is not None:
            q_BTV = jnp.exp(logits_BTV - log_sum_BT[..., None])
            apart_BT = jnp.sum(jnp.abs(q_BTV - probs.p_BTV), axis=-1)
            apart = jnp.sum(jnp.where(mask_BT, apart_BT, 0.0))
            total += teacher.distance_weight * apart
        if confidence_BT is not None:
            accepted_BT = lax.stop_gradient(1 - apart_BT / 2)
            wrong_BT = optax.sigmoid_binary_cross_entropy(confidence_BT, accepted_BT)
            total += teacher.confidence_weight * jnp.sum(jnp.where(mask_BT, wrong_BT, 0.0))
        entropy = jnp.sum(jnp.where(mask_BT, probs.entropy_BT, 0.0))
    return Sums(total, nll, top1, top5, scored, entropy)


def _stacked(sums: list[Sums]) -> Sums:
    return jax.tree.map(lambda *s: jnp.stack(s).astype(sums[0].nll.dtype), *sums)


def _no_sums(features_K: Sequence[jax.Array]) -> Sums:
    """Zeros for each head, in the type of its logits: float32 or wider."""
    zeros_K = jnp.zeros((len(features_K),), at_least_f32(features_K[0].dtype))
    return Sums(*[zeros_K] * len(Sums._fields))


class Head(NamedTuple):
    """A head's logits as a function of the parameters that it reads.

    Attributes:
      logits_fn: (those parameters, features) -> logits.
      reads: their indices in the parameters of the plan.
    """

    logits_fn: LogitsFn
    reads: list[int]


class LossPlan(NamedTuple):
    """The static arguments of the loss."""

    heads: list[Head]
    chunk: int
    teacher: Teacher | None
    rows: RowSplit


class Gradients(NamedTuple):
    """Gradients and sums accumulated over chunks by the forward pass."""

    params: list[jax.Array]
    features_K: list[jax.Array]
    sums: Sums


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _streamed(
    plan: LossPlan, params: list[jax.Array], weight_K: jax.Array, rows: Rows
) -> tuple[jax.Array, Sums]:
    return _summed(plan, params, weight_K, rows, False)[0]


def _summed(
    plan: LossPlan, params: list[jax.Array], weight_K: jax.Array, rows: Rows, gradients: bool
) -> tuple[tuple[jax.Array, Sums], tuple[list[jax.Array], tuple[jax.Array, ...]]]:  # fmt: skip
    """The loss and its sums, and the gradients of parameters and features (none without `gradients`)."""
    chunk, split = plan.chunk, plan.rows
    packed = pack(rows, chunk)
    whole = split.gather(params)

    def added(
        whole: list[jax.Array], block: Rows, d_params: list[jax.Array], sums: Sums
    ) -> Gradients:
        """Add the gradients and sums of one chunk and one shard of its rows."""
        probs, sums_K, d_features = _teacher_probs(plan.teacher, block.teacher_BTD), [], []
        # Serialise the heads; otherwise XLA keeps the logits of all at once.
        done: jax.Array | None = None
        for k, head in enumerate(plan.heads):

            def weighted(
                read_params: list[jax.Array],
                features: jax.Array,
                k: int = k,
                head: Head = head,
            ) -> tuple[jax.Array, Sums]:
                shared = (block.labels_BT, block.mask_K[k], probs, plan.teacher)
                sums = _chunk_sums(head.logits_fn, read_params, features, *shared)
                return weight_K[k] * sums.loss, sums

            read_params, features = [whole[j] for j in head.reads], block.features_K[k]
            if not gradients:
                sums_K.append(weighted(read_params, features)[1])
                continue
            gradient = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)
            if done is not None:
                features = depend_on(features, done)
            (_, sums_k), (dp, df) = gradient(read_params, features)
            done = completion_of(dp, df, sums_k)
            for j, g in zip(head.reads, dp):
                d_params[j] += g
            d_features.append(df)
            sums_K.append(sums_k)
        return Gradients(
            d_params, d_features, jax.tree.map(jnp.add, sums, _stacked(sums_K))
        )

    def body(i: jax.Array, carry: Gradients) -> Gradients:
        block = split.split(packed.rows.chunk(i, chunk))
        new = split.each(added)(whole, block, list(carry.params), carry.sums)
        d_features = [
            lax.dynamic_update_slice_in_dim(d, d_chunk, i * chunk, axis=1)
            for d, d_chunk in zip(carry.features_K, split.join(new.features_K))
        ]
        return new._replace(features_K=d_features)

    start = Gradients([], [], split.zeros(_no_sums(rows.features_K)))
    if gradients:
        d_features = jax.tree.map(jnp.zeros_like, list(packed.rows.features_K))
        start = Gradients(split.gradients(params), d_features, start.sums)
    end = lax.fori_loop(0, packed.n_chunks, body, start)
    d_params, sums = split.total((end.params, end.sums))
    # The gradient of columns beyond the last chunk is the initial zero.
    back = tuple(columns(d, packed.back_BT) for d in end.features_K)
    return (jnp.sum(weight_K * sums.loss), sums), (d_params, back)


def _streamed_bwd(
    plan: LossPlan,
    residuals: tuple[list[jax.Array], tuple[jax.Array, ...]],
    cotangents: tuple[jax.Array, Sums],
) -> tuple[list[jax.Array], None, Rows]:
    scale = cotangents[0]
    d_params, d_features = jax.tree.map(lambda g: (g * scale).astype(g.dtype), residuals)
    return d_params, None, Rows(d_features, None, None, None)  # type: ignore[arg-type]


_streamed.defvjp(partial(_summed, gradients=True), _streamed_bwd)
