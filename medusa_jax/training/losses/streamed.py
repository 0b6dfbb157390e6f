"""The loss of several heads, computed in chunks of target positions.

Only the logits of one chunk of one head exist at a time, in addition to the teacher's.

The forward pass computes the gradient of each chunk and keeps only d(features) and the running d(params). The
backward pass therefore recomputes nothing. On a mesh every device sums its own rows; these sums are added once,
at the end (`RowSplit`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as Spec

from medusa_jax.model.barrier import completion_of, depend_on
from medusa_jax.model.product import at_least_f32
from medusa_jax.training.losses.lm_heads import Head
from medusa_jax.training.losses.packing import LossColumns, RowSplit, pack, take_columns
from medusa_jax.training.losses.pairs import Sums
from medusa_jax.training.losses.terms import TERMS, Guesses, TeacherProbs, masked_sum


class LossPlan(NamedTuple):
    """The static arguments of the loss.

    Attributes:
      heads: the heads, which predict the same labels.
      teacher: the teacher's LM head, if a term reads its distribution.
      weights: of the terms, by name; those that are 0 are left out.
      specs: mesh axes of the arrays that need a gradient, by place (`HeadArrays`).
      split: how rows are split over a mesh.
      chunk: target positions at a time.
    """

    heads: list[Head]
    teacher: Head | None
    weights: dict[str, float]
    specs: dict[int, Spec]
    split: RowSplit
    chunk: int


class Gradients(NamedTuple):
    """Gradients and sums, added up over chunks by the forward pass.

    Attributes:
      params: gradients of the trained arrays, by place; {} if no gradient is computed.
      features_K: gradients of the features; [] if none is computed.
      sums: per head, [K] each.
    """

    params: dict[int, jax.Array]
    features_K: list[jax.Array]
    sums: Sums


def over_chunks(
    plan: LossPlan,
    arrays: list[jax.Array],
    weight_K: jax.Array,
    columns: LossColumns,
    gradients: bool,
) -> Any:
    """sum_k weight_k loss_k of K heads, as `streamed_loss` without gradients and as its forward pass with them.

    Args:
      arrays: of the plan's heads (`HeadArrays.arrays`).
      weight_K: factor of each head's loss.

    Returns: the loss and the sums per head, each [K]. With `gradients` a pair of these and of the gradients of
      arrays (None for fixed ones) and features.
    """
    split = plan.split
    packed = pack(columns, plan.chunk)
    gathered = list(arrays)
    for place, spec in plan.specs.items():
        gathered[place] = split.gather(arrays[place], spec)

    def body(i: jax.Array, total: Gradients) -> Gradients:
        block = split.split(packed.columns.chunk(i, plan.chunk))
        add = split.each(partial(add_block, plan, weight_K, gradients))
        new = add(gathered, block, total.params, total.sums)
        d_features = [
            lax.dynamic_update_slice_in_dim(d, d_chunk, i * plan.chunk, axis=1)
            for d, d_chunk in zip(total.features_K, split.join(new.features_K))
        ]
        return new._replace(features_K=d_features)

    # Zeros for each head, in the type of its logits: float32 or wider.
    zeros_K = jnp.zeros((len(plan.heads),), at_least_f32(columns.features_K[0].dtype))
    start = Gradients({}, [], split.zeros(Sums(*[zeros_K] * len(Sums._fields))))
    if gradients:
        start = start._replace(
            params={
                place: split.gather(split.zeros(arrays[place]), spec, accumulator=True)
                for place, spec in plan.specs.items()
            },
            features_K=[jnp.zeros_like(x) for x in packed.columns.features_K],
        )
    end = lax.fori_loop(0, packed.n_chunks, body, start)
    d_params, sums = split.total((end.params, end.sums))
    loss = jnp.sum(weight_K * sums.loss)
    if not gradients:
        return loss, sums
    # The gradient of columns after the last chunk is the initial zero.
    d_features = tuple(take_columns(d, packed.back_BT) for d in end.features_K)
    d_arrays = [d_params.get(place) for place in range(len(arrays))]
    return (loss, sums), (d_arrays, d_features)


def add_block(
    plan: LossPlan,
    weight_K: jax.Array,
    gradients: bool,
    arrays: list[jax.Array],
    block: LossColumns,
    d_params: dict[int, jax.Array],
    sums: Sums,
) -> Gradients:
    """Add the sums, and the gradients, of one chunk of one device's rows."""
    teacher: TeacherProbs | None = None
    if plan.teacher is not None:
        assert block.teacher_BTD is not None
        logits_BTV, _ = plan.teacher.logits(plan.teacher.params(arrays), block.teacher_BTD)
        teacher = TeacherProbs.of_logits(logits_BTV)
    d_params, d_features, sums_K = dict(d_params), [], []
    # Serialise the heads; otherwise XLA keeps the logits of all at once.
    completion: jax.Array | None = None
    for k, head in enumerate(plan.heads):
        head_loss = partial(
            chunk_loss,
            plan=plan,
            arrays=arrays,
            head=head,
            weight=weight_K[k],
            labels_BT=block.labels_BT,
            mask_BT=block.mask_K[k],
            teacher=teacher,
        )
        trained = {place: arrays[place] for place in head.trained}
        features_BTD = block.features_K[k]
        if not gradients:
            sums_K.append(head_loss(trained, features_BTD)[1])
            continue
        if completion is not None:
            features_BTD = depend_on(features_BTD, completion)
        gradient = jax.value_and_grad(head_loss, argnums=(0, 1), has_aux=True)
        (_, sums_k), (d_trained, d_features_k) = gradient(trained, features_BTD)
        completion = completion_of(d_trained, d_features_k, sums_k)
        for place, d in d_trained.items():
            d_params[place] += d
        d_features.append(d_features_k)
        sums_K.append(sums_k)
    new: Sums = jax.tree.map(lambda *s: jnp.stack(s).astype(sums.nll.dtype), *sums_K)
    return Gradients(d_params, d_features, jax.tree.map(jnp.add, sums, new))


def chunk_loss(
    trained: dict[int, jax.Array],
    features_BTD: jax.Array,
    *,
    plan: LossPlan,
    arrays: list[jax.Array],
    head: Head,
    weight: jax.Array,
    labels_BT: jax.Array,
    mask_BT: jax.Array,
    teacher: TeacherProbs | None,
) -> tuple[jax.Array, Sums]:
    """The weighted loss of one head over one chunk: the sum of its terms over the counted pairs; and what is logged.

    Args:
      trained: the arrays with respect to which the gradient is computed, by place.
    """
    params = head.params(dict(enumerate(arrays)) | trained)
    logits_BTV, confidence_BT = head.logits(params, features_BTD)
    guesses = Guesses(logits_BTV, labels_BT, confidence_BT, teacher)
    nll = masked_sum(guesses.nll_BT, mask_BT)
    loss, entropy = jnp.zeros_like(nll), jnp.zeros_like(nll)
    for name, term_weight in plan.weights.items():
        loss += term_weight * masked_sum(TERMS[name](guesses), mask_BT)
    if teacher is not None:
        entropy = masked_sum(teacher.entropy_BT, mask_BT)
    sums = Sums(
        loss=loss,
        nll=nll,
        top1=jnp.sum((mask_BT & (guesses.rank_BT == 0)).astype(jnp.float32)),
        top5=jnp.sum((mask_BT & (guesses.rank_BT < 5)).astype(jnp.float32)),
        scored=jnp.sum(mask_BT.astype(jnp.float32)),
        entropy=entropy,
    )
    return weight * loss, sums


def _backward(
    plan: LossPlan,
    residuals: tuple[list[jax.Array | None], tuple[jax.Array, ...]],
    cotangents: tuple[jax.Array, Sums],
) -> tuple[list[jax.Array | None], None, LossColumns]:
    scale = cotangents[0]
    d_arrays, d_features = jax.tree.map(lambda g: (g * scale).astype(g.dtype), residuals)
    return d_arrays, None, LossColumns(d_features, None, None, None)  # type: ignore[arg-type]


# (plan, arrays, weight_K, columns) -> the loss and the sums per head.
streamed_loss = jax.custom_vjp(partial(over_chunks, gradients=False), nondiff_argnums=(0,))
streamed_loss.defvjp(partial(over_chunks, gradients=True), _backward)
